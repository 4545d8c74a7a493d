"""Pictures into classes: any classifier, from scratch or fine-tuned; cross-entropy, also with mixed classes."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from normkit.lab.data.batches import Batches
from normkit.lab.data.image_folder import Broken, Split, decoded, picture_batches
from normkit.lab.data.images import Album
from normkit.lab.train.augment import Views
from normkit.lab.train.config import Run
from normkit.lab.train.ema import moving_average
from normkit.lab.train.finetune import head_of, start_from
from normkit.lab.train.task import Batch, Task
from normkit.transforms import calibrate

CALIBRATION = 50
TEST_BATCH = 256  # pictures at inference, at most
Wanted = tuple[int, Sequence[int]]  # the number of a batch and its pictures


class Loader(Dataset):
    """Batches of a split by number and pictures, made in whichever process is asked; lists what cannot be read."""

    def __init__(self, split: Split, views: Views, seed: int | None):
        self.split, self.views, self.seed = split, views, seed  # without a seed as at inference

    def __getitem__(self, wanted: Wanted) -> tuple[Tensor, Tensor, list[str]]:
        """Tensors, and what is wrong with those pictures that are not in them."""
        number, items = wanted
        pictures, kept, broken = [], [], []
        for item in items:
            try:
                pictures.append(decoded(self.split, item, self.views.least))
                kept.append(item)
            except Broken as error:
                broken.append(str(error))
        labels = torch.from_numpy(self.split.labels[kept])
        if not pictures:
            return torch.empty(0), labels, broken
        if self.seed is None:
            return *self.views.testing(pictures, labels), broken
        return *self.views.training(pictures, labels, self.seed * 1_000_003 + number), broken


class ImageClassification(Task):
    """A classifier of pictures; accuracy by the first and by the first five guesses.

    What is scored and saved is the running average of the weights, where the run keeps one.
    """

    data: Album

    def __init__(self, run: Run, model: nn.Module, data: Album):
        super().__init__(run, model, data)
        self.views = Views(run.images, data, run.model.image_size)
        self.classes = len(data.vocabularies["classes"].plain())
        if run.weights:
            self.anew = start_from(run.weights, model, self.classes)
        elif run.body_lr != 1:
            raise ValueError(
                f"body_lr={run.body_lr:g} is for fine-tuning; name the weights to start from, --weights FILE"
            )
        if run.images.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[reportCallIssue]
        if run.ema and run.strategy == "fsdp2":
            raise ValueError("ema keeps a whole second model, which strategy=fsdp2 has not; use strategy=ddp")
        self.ema = moving_average(model, run.ema) if run.ema else None

    # -- training ---------------------------------------------------------------------------------------------------

    def batches(self, start: int) -> Iterator[Batch]:
        """Random pictures, `batch_tokens` of them, made in this process."""
        return self._made(self.data.train, self._order(start), self.settings.seed, 0)

    def train_dataloader(self) -> Iterator[Batch]:
        """The batches of this process; the pictures of the others are not read."""
        ranks = self.trainer.world_size
        order = itertools.islice(self._order(self.start * ranks), self.trainer.global_rank, None, ranks)
        return self._made(self.data.train, order, self.settings.seed, self.settings.workers)

    def _order(self, start: int) -> Iterator[Wanted]:
        run, split = self.settings, self.data.train

        def epoch(number: int) -> list[list[int]]:
            return picture_batches(split, run.batch_tokens, seed=run.seed, epoch=number)

        return enumerate(Batches(epoch, list, start), start)

    def _made(self, split: Split, order: Iterable[Wanted], seed: int | None, workers: int) -> Iterator[Batch]:
        """Batches in the order asked for; what cannot be read is left out and noted, or an error."""
        loader = DataLoader(
            Loader(split, self.views, seed),
            batch_size=None,
            sampler=order,  # type: ignore[reportArgumentType]
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else its iterator draws from the one that dropout draws from
        )
        found = ((Batch((images, labels), len(labels), len(labels)), broken) for images, labels, broken in loader)
        return self.read(found, endless=seed is not None)

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Cross-entropy of the classes, or of their shares where pictures are mixed."""
        images, labels = batch.tensors
        return F.cross_entropy(self._scores(self.model, images), labels, label_smoothing=smoothing)

    def _scores(self, model: nn.Module, images: Tensor) -> Tensor:
        if self.settings.images.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return model(images)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """A step, after which the average of the weights moves."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def groups(self) -> list[dict[str, Any]]:
        """Matrices and vectors, of the head at `lr` and of all else at `body_lr * lr`; each parameter once.

        The final norm is among them, also while fine-tuning: Unified Normalization's script leaves it out.
        """
        run = self.settings
        if run.body_lr == 1:
            return super().groups()
        head = {id(parameter) for parameter in head_of(self.model, self.classes).parameters()}
        found = []
        for share, inside in ((1.0, True), (run.body_lr, False)):
            for decay, matrix in ((run.weight_decay, True), (0.0, False)):
                chosen = [p for p in self.model.parameters() if (id(p) in head, p.dim() > 1) == (inside, matrix)]
                found.append({"params": chosen, "weight_decay": decay, "lr": share * run.lr})
        return found

    # -- scores -----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """At the end of training: the average takes the model's place."""
        if self.ema is not None and int(self.ema.n_averaged):
            self.model.load_state_dict(self.ema.module.state_dict())

    def look(self) -> dict[str, float]:
        """Loss and accuracies of the validation split."""
        found = self._judged(self.model if self.ema is None else self.ema.module, self.data.valid)
        return {name: found[name] for name in ("loss", "accuracy", "top5")}

    def validate(self) -> float:
        """Mean loss of the validation split, at inference."""
        return self.look()["loss"]

    def score(self, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Accuracies in percent on the test split, with running statistics and with calibrated ones."""
        tell("scoring")
        scores = {"running": self._judged(self.model, self.data.test)}
        if self.has_statistics():
            batches = itertools.islice(self.batches(0), CALIBRATION)
            tuned = calibrate(
                self.model, batches, forward=lambda model, b: self._scores(model, self.on_device(b).tensors[0])
            )
            tell("scoring with calibrated statistics")
            scores["calibrated"] = self._judged(tuned, self.data.test)
        return scores

    @torch.no_grad()
    def _judged(self, model: nn.Module, split: Split) -> dict[str, float]:
        """Mean loss, and how often the class is the first guess or among five, in percent, with sampling errors."""
        from torchmetrics.classification import MulticlassAccuracy

        was, count = model.training, len(split.labels)
        tops = {"accuracy": 1, "top5": min(5, self.classes)}
        metrics = {
            name: MulticlassAccuracy(self.classes, top_k=k, average="micro").to(self.device) for name, k in tops.items()
        }
        model.eval()
        order = [(0, range(at, min(at + TEST_BATCH, count))) for at in range(0, count, TEST_BATCH)]
        total, seen = 0.0, 0
        for batch in self._made(split, order, None, self.settings.workers):
            images, labels = self.on_device(batch).tensors
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16-mixed"):
                logits = self._scores(model, images).float()
            total += float(F.cross_entropy(logits, labels, reduction="sum"))
            seen += len(labels)
            for metric in metrics.values():
                metric.update(logits, labels)
        model.train(was)
        if not seen:
            raise ValueError(f"none of the {count:,} pictures to score can be read; the first: {min(self.broken)}")
        shares = {name: round(float(metric.compute()), 6) for name, metric in metrics.items()}  # those are float32
        found = {"loss": total / seen, **{name: 100 * share for name, share in shares.items()}, "n": seen}
        share = shares["accuracy"]
        return {**found, "accuracy_error": 100 * (share * (1 - share) / seen) ** 0.5}

    def facts(self) -> dict[str, object]:
        """What the run was trained on, and what of it could not be used."""
        splits = {name: len(getattr(self.data, name).labels) for name in ("train", "valid", "test")}
        facts: dict[str, object] = {"name": self.data.name, "splits": splits, "classes": self.classes}
        if self.settings.weights:
            facts["weights"] = {"from": self.settings.weights, "begun_anew": self.anew}
        if self.data.notes:
            facts["notes"] = list(self.data.notes)
        return facts | self.broken_facts()
