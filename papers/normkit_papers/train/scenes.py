"""Batches for a detector: images with boxes, read and augmented, also in worker processes."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from normkit_papers.data.scenes import Scenes
from normkit_papers.models.detection import Detector
from normkit_papers.models.torchvision_ops import load_torchvision
from normkit_papers.train.task import Batch

Target = dict[str, Any]
FIRST_SIZES = (400, 500, 600)  # shorter sides of an image before it is cropped


class Item(NamedTuple):
    """An image of an epoch."""

    epoch: int
    at: int  # in the split


class Samples(Dataset):
    """Images and targets by number, with error messages of images that cannot be decoded.

    The augmentation depends on seed, epoch and number only. With augmentation, the next image replaces one that cannot
    be decoded; without, for scoring, the sample is None.
    """

    def __init__(self, scenes: Scenes, *, masks: bool, augment: Callable | None, seed: int = 0):
        self.scenes, self.masks, self.augment, self.seed = scenes, masks, augment, seed

    def __getitem__(self, item: Item) -> tuple[tuple[torch.Tensor, Target] | None, list[str]]:
        broken: list[str] = []
        for further in range(len(self.scenes) if self.augment is not None else 1):
            index = (item.at + further) % len(self.scenes)
            try:
                image = self.scenes.image(index)
            except ValueError as error:
                broken.append(str(error))
                continue
            return self._sample(image, index, item), broken
        return None, broken

    def _sample(self, image: torch.Tensor, index: int, item: Item) -> tuple[torch.Tensor, Target]:
        scene = self.scenes.scenes[index]
        target: Target = {"boxes": scene.boxes, "labels": scene.labels, "number": scene.number}
        if self.masks:
            target["masks"] = self.scenes.masks(index)
        if self.augment is not None:
            with torch.random.fork_rng(devices=[]):
                seed = (((self.seed * 1_000_003 + item.epoch) << 24) + item.at) % 2**64
                torch.default_generator.manual_seed(seed)  # not those of GPUs, which no worker could reach
                image, target = self.augment(image, target)
        return image.float() / 255, target


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

    def __call__(self, image: torch.Tensor, target: Target) -> tuple[torch.Tensor, Target]:
        """Augment an image with boxes, labels and masks; objects that are cropped away go."""
        from torchvision import tv_tensors

        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=image.shape[-2:])  # type: ignore[call-overload]
        masks = {"masks": tv_tensors.Mask(target["masks"])} if "masks" in target else {}
        sample = tv_tensors.Image(image), {"boxes": boxes, "labels": target["labels"], **masks}
        sample = self.flip(*sample)
        if self.crop is not None and torch.rand(()) < 0.5:
            sample = self._random_crop(*self.first(*sample))
        image, target = self.sanitize(*self.resize(*sample))
        return image.as_subclass(torch.Tensor), {key: t.as_subclass(torch.Tensor) for key, t in target.items()}

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


def load_batches(samples: Samples, order: Iterable[list[Item]], workers: int) -> Iterator[tuple[Batch, list[str]]]:
    """Yield batches in an order, each with the error messages of images that are not in it."""
    own: Any = {"generator": torch.Generator()}  # the loader would otherwise draw from the generator of dropout
    loader = DataLoader(samples, batch_sampler=order, num_workers=workers, collate_fn=_collate, **own)  # type: ignore[arg-type]
    return iter(loader)


def _collate(samples: list[tuple[tuple[torch.Tensor, Target] | None, list[str]]]) -> tuple[Batch, list[str]]:
    """Make lists of images and targets, whose sizes differ."""
    images, targets = [], []
    for sample, _ in samples:
        if sample is not None:
            images.append(sample[0])
            targets.append(sample[1])
    return Batch((images, targets), len(images), len(images)), [why for _, broken in samples for why in broken]
