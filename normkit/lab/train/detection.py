"""Things in pictures: boxes and masks."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from normkit.lab.data.batches import Batches, batches_of
from normkit.lab.data.coco import Scenes
from normkit.lab.models.detection import DETECTORS
from normkit.lab.models.torchvision_ops import torchvision_operators
from normkit.lab.train.finetune import read_weights
from normkit.lab.train.pairs import spread
from normkit.lab.train.precision import average_precision, found
from normkit.lab.train.scenes import Augmentation, Item, Samples, load_batches
from normkit.lab.train.task import Batch, Task
from normkit.norms import Norm
from normkit.transforms import calibrate

CALIBRATION = 50  # training batches
VALID = 500  # pictures of a look at the validation split
TOGETHER = 4  # pictures that are looked at together when they are scored


class Detection(Task):
    """Faster or Mask R-CNN with the sum of its losses; average precision of boxes and masks."""

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        self.detector = DETECTORS[run.model.arch]
        for scenes in (data.train, data.test):
            if self.detector.masks and not scenes.outlined:
                raise ValueError(f"{data.name} has things without outlines, which {run.model.arch} cannot learn from")
        self.samples = self._samples(data.train, Augmentation(self.detector))
        if run.weights:
            start_backbone(run.weights, model)

    def batches(self, start: int) -> Iterator[Batch]:
        """Random pictures, `batch_tokens` of them, of about one shape with bucketing."""
        return self.read(load_batches(self.samples, self._order(start), self.settings.workers))

    def train_dataloader(self) -> Iterator[Batch]:
        """The batches of this process: of several, each reads every so many."""
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        order = itertools.islice(self._order(self.start * ranks + rank), 0, None, ranks)
        return self.read(load_batches(self.samples, order, self.settings.workers))

    def groups(self) -> list[dict[str, Any]]:
        """As other tasks, and Swin's tables of relative positions do not decay either, as upstream trains it."""
        tables = [p for name, p in self.model.named_parameters() if name.endswith("relative_position_bias_table")]
        matrices, vectors = super().groups()
        kept = {id(p) for p in tables}
        matrices["params"] = [p for p in matrices["params"] if id(p) not in kept]
        vectors["params"] = [*vectors["params"], *tables]
        return [matrices, vectors]

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Sum of the losses of the proposals and of the heads, of a model that trains."""
        return torch.stack(list(self.losses(batch).values())).sum()

    def losses(self, batch: Batch) -> dict[str, Tensor]:
        """Loss by part: of the kinds, the boxes, the masks, and the proposals' two."""
        return self.model(*batch.tensors)

    def look(self) -> dict[str, float]:
        """Losses by part and average precision of some pictures of the validation split."""
        return self._scored(self.data.valid, VALID)

    def facts(self) -> dict[str, object]:
        """What the run was trained on, what was left out of that, and whose operators computed."""
        return {
            "name": self.data.name,
            "train": self.data.train.counts,
            "test": self.data.test.counts,
            "operators": torchvision_operators(),
            **self.broken_facts(),
        }

    def score(self, tell: Callable[[str], None]) -> dict[str, dict[str, float]]:
        """Average precision of the test split, with running statistics and with calibrated ones."""
        tell("scoring")
        scores = {"running": self.score_running()}
        if self.has_statistics():
            tell("calibrating")
            batches = list(itertools.islice(self.batches(0), CALIBRATION))
            trained = self.model
            self.model = calibrate(trained, batches, forward=self._backbone)
            scores["calibrated"] = self.score_running()
            self.model = trained
        return scores

    def score_running(self) -> dict[str, float]:
        """Losses and average precision of the test split with the statistics that the model has."""
        return self._scored(self.data.test, self.settings.test_items or len(self.data.test))

    def on_device(self, batch: Batch) -> Batch:
        """The batch where the model is."""
        return self.transfer_batch_to_device(batch, self.device, 0)

    @torch.no_grad()
    def _scored(self, scenes: Scenes, many: int) -> dict[str, float]:
        """Mean losses at inference, average precision, and the number of pictures looked at."""
        was, rows, seen = self.model.training, list[dict[str, Any]](), list[int]()
        totals: dict[str, float] = {}
        kinds = list(scenes.kinds)
        items = [Item(0, at) for at in spread(len(scenes), many)]
        order = [items[at : at + TOGETHER] for at in range(0, len(items), TOGETHER)]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)  # which boxes the heads' losses are computed of
            batches = load_batches(self._samples(scenes, None), order, self.settings.workers)
            for each in self.read(batches, endless=False):
                batch = self.on_device(each)
                pictures, targets = batch.tensors
                _prepare_losses(self.model)
                for part, loss in self.losses(batch).items():
                    totals[part] = totals.get(part, 0.0) + float(loss) * batch.words
                self.model.eval()
                for target, detections in zip(targets, self.model(pictures), strict=True):
                    seen.append(int(target["number"]))
                    rows += found(seen[-1], kinds, detections)
        self.model.train(was)
        if not seen:
            raise ValueError(f"{scenes.files.path} has no picture that can be read")
        means = {part: total / len(seen) for part, total in totals.items()}
        scores = average_precision(_of(scenes.truth, set(seen)), rows, self.detector.masks)
        return {"loss": sum(means.values()), **means, **scores, "n": len(seen)}

    def _backbone(self, model: Any, batch: Batch) -> Any:
        pictures, _ = self.on_device(batch).tensors
        return model.backbone(model.transform(pictures)[0].tensors)

    def _samples(self, scenes: Scenes, augment: Augmentation | None) -> Samples:
        return Samples(scenes, masks=self.detector.masks, augment=augment, seed=self.settings.seed)

    def _order(self, start: int) -> Iterator[list[Item]]:
        """Which pictures go together, from the `start`-th batch on."""
        run, scenes = self.settings, self.data.train.scenes
        shapes = [scene.width / scene.height for scene in scenes]

        def epoch(number: int) -> list[Any]:
            ones = [1] * len(scenes)
            lists = batches_of(ones, run.batch_tokens, bucketing=run.bucketing, by=shapes, seed=run.seed, epoch=number)
            return [[Item(number, at) for at in each.tolist()] for each in lists]

        return iter(Batches(epoch, list, start))


@torch.no_grad()
def start_backbone(weights: str, model: Any) -> list[str]:
    """Load a Swin classifier into a detector's backbone, in place; the names that start anew: norms of the outputs.

    `weights` is a file of safetensors, or a folder with model.safetensors, named as torchvision's Swin. Statistics of
    norms are loaded where there are some, and their warm-up begins again. ValueError where anything does not fit.
    """
    features = model.backbone.body.features
    saved = {name.removeprefix("features."): tensor for name, tensor in read_weights(weights).items()}
    wanted = features.state_dict()
    state = {name: saved[name] for name in wanted if name in saved and saved[name].shape == wanted[name].shape}
    buffers = {name for name, _ in features.named_buffers()}
    lacking = [name for name in wanted if name not in state and name not in buffers]
    if lacking:
        raise ValueError(
            f"weights: {weights} has no features.{lacking[0]} of shape {tuple(wanted[lacking[0]].shape)} and "
            f"{len(lacking) - 1} more; needs a Swin of this size"
        )
    features.load_state_dict(state, strict=False)
    for norm in features.modules():
        if isinstance(norm, Norm):
            norm.reset_warmup()
    return [name for name in model.backbone.body.state_dict() if name.removeprefix("features.") not in state]


def _prepare_losses(model: Any) -> None:
    """The model as it gives losses, with its backbone and the size of pictures as at inference."""
    model.train()
    model.backbone.eval()
    model.transform.eval()


def _of(truth: dict[str, Any], pictures: set[int]) -> dict[str, Any]:
    """The truth of some pictures."""
    return {
        "images": [picture for picture in truth["images"] if picture["id"] in pictures],
        "annotations": [note for note in truth["annotations"] if note["image_id"] in pictures],
        "categories": truth["categories"],
    }
