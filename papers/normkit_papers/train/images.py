"""Image classification, from scratch or by fine-tuning, also with mixed labels."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from normkit_papers.data.batches import endless
from normkit_papers.data.images import Broken, ImageData, ImageSplit, decode, image_batches
from normkit_papers.train.augment import ImageAugmentation
from normkit_papers.train.config import Run
from normkit_papers.train.ema import moving_average
from normkit_papers.train.finetune import head_of, start_from
from normkit_papers.train.task import Batch, Task, decay_groups

TEST_BATCH = 256  # images
Request = tuple[int, Sequence[int]]  # the number of a batch and its images


class ImageBatches(Dataset):
    """Batches of images and labels, chosen by the number of a batch and those of its images.

    They come with the error messages of images that cannot be read. The process that asks for a batch makes it.
    """

    def __init__(self, split: ImageSplit, augmentation: ImageAugmentation, seed: int | None):
        self.split, self.augmentation, self.seed = split, augmentation, seed  # no seed: as at inference

    def __getitem__(self, request: Request) -> tuple[Tensor, Tensor, list[str]]:
        """Return images, labels, and error messages of images that cannot be read."""
        number, items = request
        images, kept, broken = [], [], []
        for item in items:
            try:
                images.append(decode(self.split, item, self.augmentation.least))
                kept.append(item)
            except Broken as error:
                broken.append(str(error))
        labels = torch.from_numpy(self.split.labels[kept])
        if not images:
            return torch.empty(0), labels, broken
        if self.seed is None:
            return *self.augmentation.test(images, labels), broken
        return *self.augmentation.train(images, labels, self.seed * 1_000_003 + number), broken


class ImageClassification(Task):
    """Cross-entropy of classes or of mixed labels; accuracy of one guess and of five.

    If the run keeps a moving average of the weights, that is scored and saved.
    """

    data: ImageData

    def __init__(self, run: Run, model: nn.Module, data: ImageData):
        super().__init__(run, model, data)
        self.augmentation = ImageAugmentation(run.images, data, run.model.image_size)
        self.classes = len(data.vocabularies["classes"].plain())
        if run.weights:
            self.initialized = start_from(run.weights, model, head_of(model, self.classes))
        elif run.body_lr != 1:
            raise ValueError(
                f"body_lr={run.body_lr:g} is for fine-tuning; name the weights to start from, --weights FILE"
            )
        if run.images.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[reportCallIssue]
        if run.ema and run.strategy == "fsdp2":
            raise ValueError("ema needs the whole model in each process, unlike strategy=fsdp2; use strategy=ddp")
        self.ema = moving_average(model, run.ema) if run.ema else None

    # -- training -----------------------------------------------------------------------------------------------------

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield random batches of `batch_tokens` images."""
        run, split = self.settings, self.data.train

        def epoch(number: int) -> list[list[int]]:
            return image_batches(split, run.batch_tokens, seed=run.seed, epoch=number)

        order = zip(itertools.count(start, stride), endless(epoch, list, start, stride), strict=False)
        return self._load(split, order, run.seed)

    def _load(self, split: ImageSplit, order: Iterable[Request], seed: int | None) -> Iterator[Batch]:
        """Yield batches in an order; images that cannot be read are skipped, or an error."""
        loader = DataLoader(
            ImageBatches(split, self.augmentation, seed),
            batch_size=None,
            sampler=order,  # type: ignore[reportArgumentType]
            num_workers=self.settings.workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # the loader would otherwise draw from the generator of dropout
        )
        found = ((Batch((images, labels), len(labels), len(labels)), broken) for images, labels, broken in loader)
        return self.skip_broken(found, endless=seed is not None)

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the cross-entropy of the classes, or of their mixtures."""
        images, labels = batch.tensors
        return F.cross_entropy(self._logits(self.model, images), labels, label_smoothing=smoothing)

    def _logits(self, model: nn.Module, images: Tensor) -> Tensor:
        if self.settings.images.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return model(images)

    def forward_norms(self, model: Any, batch: Batch) -> Tensor:
        """Compute the logits."""
        return self._logits(model, self.on_device(batch).tensors[0])

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """Step, then update the moving average of the weights."""
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.ema is not None:
            self.ema.update_parameters(self.model)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return matrices and vectors, of the head with `lr` and of the rest with `body_lr * lr`.

        The final norm is included in fine-tuning too: Unified Normalization's script leaves it out.
        """
        run = self.settings
        if run.body_lr == 1:
            return super().parameter_groups()
        head = list(head_of(self.model, self.classes).parameters())
        of_head = {id(parameter) for parameter in head}
        body = [parameter for parameter in self.model.parameters() if id(parameter) not in of_head]
        parts = ((head, run.lr), (body, run.body_lr * run.lr))
        return [{**group, "lr": lr} for part, lr in parts for group in decay_groups(part, run.weight_decay)]

    # -- scores -------------------------------------------------------------------------------------------------------

    def finish_training(self) -> None:
        """Replace the weights by their moving average."""
        if self.ema is not None and int(self.ema.n_averaged):
            self.model.load_state_dict(self.ema.module.state_dict())

    def validate(self) -> dict[str, float]:
        """Return loss and accuracies of the validation split."""
        found = self._score(self.model if self.ema is None else self.ema.module, self.data.valid)
        return {name: found[name] for name in ("loss", "accuracy", "top5")}

    def score_test(self) -> dict[str, float]:
        """Return loss and accuracies of the test split."""
        return self._score(self.model, self.data.test)

    @torch.no_grad()
    def _score(self, model: nn.Module, split: ImageSplit) -> dict[str, float]:
        """Return the mean loss, and accuracies in percent with their sampling error."""
        from torchmetrics.classification import MulticlassAccuracy

        was, count = model.training, len(split.labels)
        tops = {"accuracy": 1, "top5": min(5, self.classes)}
        metrics = {
            name: MulticlassAccuracy(self.classes, top_k=k, average="micro").to(self.device) for name, k in tops.items()
        }
        model.eval()
        order = [(0, range(at, min(at + TEST_BATCH, count))) for at in range(0, count, TEST_BATCH)]
        total, seen = 0.0, 0
        for batch in self._load(split, order, None):
            images, labels = self.on_device(batch).tensors
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.precision == "bf16-mixed"):
                logits = self._logits(model, images).float()
            total += float(F.cross_entropy(logits, labels, reduction="sum"))
            seen += len(labels)
            for metric in metrics.values():
                metric.update(logits, labels)
        model.train(was)
        if not seen:
            raise ValueError(f"none of the {count:,} images to score can be read; the first: {min(self.broken)}")
        shares = {name: round(float(metric.compute()), 6) for name, metric in metrics.items()}  # those are float32
        share = shares["accuracy"]
        percent = {name: 100 * value for name, value in shares.items()}
        return {"loss": total / seen, **percent, "n": seen, "accuracy_error": 100 * (share * (1 - share) / seen) ** 0.5}

    def test_images(self, count: int, size: int) -> Iterator[Tensor]:
        """Yield the first `count` test images in batches of `size`."""
        ends = range(size, min(count, len(self.data.test.labels)) + 1, size)
        for batch in self._load(self.data.test, [(0, range(end - size, end)) for end in ends], None):
            yield self.on_device(batch).tensors[0]

    def describe_data(self) -> dict[str, object]:
        """Return sizes of the splits, the origin of the weights, and what could not be used."""
        facts = super().describe_data()
        facts["splits"] = {name: len(getattr(self.data, name).labels) for name in ("train", "valid", "test")}
        facts["classes"] = self.classes
        if self.settings.weights:
            facts["weights"] = {"from": self.settings.weights, "begun_anew": self.initialized}
        if self.data.notes:
            facts["notes"] = list(self.data.notes)
        return facts
