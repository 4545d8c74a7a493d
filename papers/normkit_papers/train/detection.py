"""Object detection and instance segmentation: boxes and masks; batches, also read in worker processes."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from normkit_papers.data.batches import Batch, batches_of, endless, load, spread
from normkit_papers.data.scenes import Scenes
from normkit_papers.models.detection import DETECTORS, Detector
from normkit_papers.models.torchvision_ops import load_torchvision, torchvision_operators
from normkit_papers.train.scores import average_precision, precision_metric
from normkit_papers.train.task import Task
from normkit_papers.train.weights import start_from

TEST_BATCH = 4  # images
Target = dict[str, Any]
FIRST_SIZES = (400, 500, 600)  # shorter sides of an image before it is cropped


class Item(NamedTuple):
    """An image of an epoch."""

    epoch: int
    at: int  # in the split


class Samples(Dataset):
    """Images and targets by number; their augmentation depends on seed, epoch and number only."""

    def __init__(self, scenes: Scenes, *, masks: bool, augment: Callable | None, seed: int = 0):
        self.scenes, self.masks, self.augment, self.seed = scenes, masks, augment, seed

    def __getitem__(self, item: Item) -> tuple[Tensor, Target]:
        image, target = self.scenes.image(item.at), self.scenes.objects(item.at, self.masks)
        if self.augment is not None:
            target = without_crowds(target)
            with torch.random.fork_rng(devices=[]):
                seed = (((self.seed * 1_000_003 + item.epoch) << 24) + item.at) % 2**64
                torch.default_generator.manual_seed(seed)  # not those of GPUs, which no worker could reach
                image, target = self.augment(image, target)
        return image.float() / 255, target


def without_crowds(target: Target) -> Target:
    """Return what a detector learns from: boxes, labels and masks of single objects."""
    return {key: target[key][target["iscrowd"] == 0] for key in ("boxes", "labels", "masks") if key in target}


class SceneAugmentation:
    """Random flip and size, and for half of the images a random crop.

    As Swin-Transformer-Object-Detection trains (after DETR), with torchvision's transforms. Resizing has no
    antialiasing, neither here nor at inference.
    """

    def __init__(self, detector: Detector):
        load_torchvision()
        from torchvision.transforms import v2

        self.crop = detector.crop
        self.flip = v2.RandomHorizontalFlip()
        self.resize = v2.RandomShortestSize(list(detector.sizes), detector.longest, antialias=False)
        self.first = v2.RandomShortestSize(list(FIRST_SIZES), antialias=False)
        self.sanitize = v2.SanitizeBoundingBoxes()

    def __call__(self, image: Tensor, target: Target) -> tuple[Tensor, Target]:
        """Augment an image with boxes, labels and masks; objects that are cropped away go."""
        from torchvision import tv_tensors

        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=image.shape[-2:])  # type: ignore[call-overload]
        masks = {"masks": tv_tensors.Mask(target["masks"])} if "masks" in target else {}
        sample = tv_tensors.Image(image), {"boxes": boxes, "labels": target["labels"], **masks}
        sample = self.flip(*sample)
        if self.crop is not None and torch.rand(()) < 0.5:
            sample = self._random_crop(*self.first(*sample))
        image, target = self.sanitize(*self.resize(*sample))
        return image.as_subclass(Tensor), {key: t.as_subclass(Tensor) for key, t in target.items()}

    def _random_crop(self, image: Any, target: Target) -> tuple[Any, Target]:
        """Crop to a window whose sides are between those of `crop`, or as large as the image."""
        from torchvision.transforms.v2 import functional

        assert self.crop is not None
        low, high = self.crop
        height, width = image.shape[-2:]
        sides = [int(torch.randint(min(low, side), min(high, side) + 1, ())) for side in (height, width)]
        top, left = (
            int(torch.randint(0, whole - side + 1, ())) for whole, side in zip((height, width), sides, strict=True)
        )
        window = (top, left, *sides)
        parts = {key: functional.crop(target[key], *window) for key in target if key != "labels"}
        return functional.crop(image, *window), {**target, **parts}


def _collate(samples: list[tuple[Tensor, Target]]) -> Batch:
    """Make lists of images and targets, whose sizes differ."""
    images, targets = map(list, zip(*samples, strict=True))
    return Batch((images, targets), len(images), len(images))


class Detection(Task):
    """Sum of the losses of Faster or Mask R-CNN; average precision of boxes and masks."""

    def __init__(self, run, model, data):
        super().__init__(run, model, data)
        self.criterion, self.detector = None, DETECTORS[run.model.arch]
        for scenes in (data.train, data.test):
            if self.detector.masks and not scenes.has_outlines:
                raise ValueError(
                    f"{data.name} has objects without outlines, and {run.model.arch} trains masks; use a faster_rcnn "
                    "model or add the outlines"
                )
        self.samples = self._samples(data.train, SceneAugmentation(self.detector))

    def load_pretrained(self) -> None:
        """Load the weights of the backbone, under torchvision's names."""
        if self.settings.weights:
            start_from(self.settings.weights, self.model.get_submodule("backbone.body.features"), prefix="features.")

    def batches(self, start: int, stride: int = 1) -> Iterator[Batch]:
        """Yield random batches of `batch_tokens` images, of similar aspect ratio with bucketing."""
        return load(self.samples, self.settings.workers, batch_sampler=self._order(start, stride), collate_fn=_collate)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the groups of `Task`; Swin's tables of relative positions have no weight decay."""
        tables = [p for name, p in self.model.named_parameters() if name.endswith("relative_position_bias_table")]
        matrices, vectors = super().parameter_groups()
        kept = {id(p) for p in tables}
        matrices["params"] = [p for p in matrices["params"] if id(p) not in kept]
        vectors["params"] = [*vectors["params"], *tables]
        return [matrices, vectors]

    def loss(self, batch: Batch, smoothing: float = 0.0) -> Tensor:
        """Return the sum of the losses of proposals and heads; the model is in training mode."""
        return torch.stack(list(self.model(*batch.tensors).values())).sum()

    def validate(self) -> dict[str, float]:
        """Return losses and average precision of `valid_items` images of validation."""
        return self._score(self.data.valid, self.settings.valid_items)

    def score_test(self) -> dict[str, float]:
        """Return losses and average precision of the test split."""
        return self._score(self.data.test, self.settings.test_items)

    def describe_data(self) -> dict[str, object]:
        """Return sizes of the splits, what was left out, and the source of the operators."""
        return {
            **super().describe_data(),
            "train": self.data.train.counts,
            "test": self.data.test.counts,
            "operators": torchvision_operators(),
        }

    def forward_norms(self, model: Any, batch: Batch) -> Any:
        """Compute the feature maps of the backbone, which has all the norms."""
        images, _ = self.on_device(batch).tensors
        return model.backbone(model.transform(images)[0].tensors)

    @torch.no_grad()
    def _score(self, scenes: Scenes, many: int) -> dict[str, float]:
        """Return mean losses, average precision, and the number of images; `many` 0 uses all."""
        model: Any = self.model
        was, seen, totals = model.training, 0, dict[str, float]()
        precision = precision_metric(self.detector.masks)
        items = [Item(0, at) for at in spread(len(scenes), many or len(scenes))]
        order = [items[at : at + TEST_BATCH] for at in range(0, len(items), TEST_BATCH)]
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(0)  # the losses of the heads use a random sample of boxes
            samples = self._samples(scenes, None)
            for each in load(samples, self.settings.workers, batch_sampler=order, collate_fn=_collate):
                batch = self.on_device(each)
                images, whole = batch.tensors
                targets = list(map(without_crowds, whole))
                model.train()  # it returns losses, with backbone and image sizes as at inference
                model.backbone.eval()
                model.transform.eval()
                for part, loss in model(images, targets).items():
                    totals[part] = totals.get(part, 0.0) + float(loss) * batch.words
                model.eval()
                found = model(images)
                for answer in found:
                    if "masks" in answer:
                        answer["masks"] = answer["masks"][:, 0] > 0.5
                precision.update(found, whole)
                seen += len(whole)
        model.train(was)
        means = {part: total / seen for part, total in totals.items()}
        return {"loss": sum(means.values()), **means, **average_precision(precision), "n": seen}

    def _samples(self, scenes: Scenes, augment: SceneAugmentation | None) -> Samples:
        return Samples(scenes, masks=self.detector.masks, augment=augment, seed=self.settings.seed)

    def _order(self, start: int, stride: int) -> Iterator[list[Item]]:
        """Yield the images of each batch, as `batches`."""
        run, scenes = self.settings, self.data.train.scenes
        shapes = [scene.width / scene.height for scene in scenes]

        def epoch(number: int) -> list[Any]:
            ones = [1] * len(scenes)
            lists = batches_of(ones, run.batch_tokens, bucketing=run.bucketing, by=shapes, seed=run.seed, epoch=number)
            return [[Item(number, at) for at in each.tolist()] for each in lists]

        return endless(epoch, list, start, stride)
