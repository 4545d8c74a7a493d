"""Pictures with boxes as a detector learns from them: read, augmented, in batches, in processes of their own."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from normkit.lab.data.coco import Scenes
from normkit.lab.models.detection import Detector
from normkit.lab.models.torchvision_ops import load_torchvision
from normkit.lab.train.task import Batch

Target = dict[str, Any]
FIRST_SIZES = (400, 500, 600)  # shorter sides of a picture before it is cropped


class Item(NamedTuple):
    """A picture of an epoch."""

    epoch: int
    at: int  # in the split


class Samples(Dataset):
    """Pictures and targets by number, augmented by chance that hangs on seed, epoch and number alone.

    With each comes what is wrong with pictures whose pixels cannot be decoded. The next one stands in for such a
    picture; without augmentation, for scoring, None does.
    """

    def __init__(self, scenes: Scenes, *, masks: bool, augment: Callable | None, seed: int = 0):
        self.scenes, self.masks, self.augment, self.seed = scenes, masks, augment, seed

    def __getitem__(self, item: Item) -> tuple[tuple[torch.Tensor, Target] | None, list[str]]:
        broken: list[str] = []
        for further in range(len(self.scenes) if self.augment is not None else 1):
            index = (item.at + further) % len(self.scenes)
            try:
                picture = self.scenes.picture(index)
            except ValueError as error:
                broken.append(str(error))
                continue
            return self._shown(picture, index, item), broken
        return None, broken

    def _shown(self, picture: torch.Tensor, index: int, item: Item) -> tuple[torch.Tensor, Target]:
        scene = self.scenes.scenes[index]
        target: Target = {"boxes": scene.boxes, "labels": scene.labels, "number": torch.tensor(scene.number)}
        if self.masks:
            target["masks"] = self.scenes.masks(index)
        if self.augment is not None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(((self.seed * 1_000_003 + item.epoch) << 24) + item.at)
                picture, target = self.augment(picture, target)
        return picture.float() / 255, target


class Augmentation:
    """Left and right by chance, a size by chance, and for half of the pictures a part of them by chance.

    As Swin-Transformer-Object-Detection trains (after DETR), with torchvision's transforms. Resizing does not smooth,
    which it does not at inference either.
    """

    def __init__(self, detector: Detector):
        load_torchvision()
        from torchvision.transforms import v2

        self.crop = detector.crop
        self.flip = v2.RandomHorizontalFlip()
        self.resize = v2.RandomShortestSize(list(detector.sizes), detector.longest, antialias=False)
        self.first = v2.RandomShortestSize(list(FIRST_SIZES), antialias=False)
        self.tidy = v2.SanitizeBoundingBoxes()

    def __call__(self, picture: torch.Tensor, target: Target) -> tuple[torch.Tensor, Target]:
        """A picture and its boxes, labels and masks, changed alike; things that were cut away are gone."""
        from torchvision import tv_tensors

        boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=picture.shape[-2:])  # type: ignore[call-overload]
        masks = {"masks": tv_tensors.Mask(target["masks"])} if "masks" in target else {}
        sample = tv_tensors.Image(picture), {"boxes": boxes, "labels": target["labels"], **masks}
        sample = self.flip(*sample)
        if self.crop is not None and torch.rand(()) < 0.5:
            sample = self._part(*self.first(*sample))
        picture, target = self.tidy(*self.resize(*sample))
        return picture.as_subclass(torch.Tensor), {key: t.as_subclass(torch.Tensor) for key, t in target.items()}

    def _part(self, picture: Any, target: Target) -> tuple[Any, Target]:
        """A window whose sides are between those of `crop`, or all there is."""
        from torchvision.transforms.v2 import functional

        assert self.crop is not None
        low, high = self.crop
        height, width = picture.shape[-2:]
        sides = [int(torch.randint(min(low, side), min(high, side) + 1, ())) for side in (height, width)]
        top, left = (
            int(torch.randint(0, whole - side + 1, ())) for whole, side in zip((height, width), sides, strict=True)
        )
        window = (top, left, *sides)
        parts = {key: functional.crop(target[key], *window) for key in target if key != "labels"}
        return functional.crop(picture, *window), {**target, **parts}


def load_batches(samples: Samples, order: Iterable[list[Item]], workers: int) -> Iterator[tuple[Batch, list[str]]]:
    """Batches of samples in that order, each with what is wrong with pictures that are not in it."""
    chance: Any = {"generator": torch.Generator()}  # so that it draws nothing from the run's own
    loader = DataLoader(samples, batch_sampler=order, num_workers=workers, collate_fn=_together, **chance)  # type: ignore[arg-type]
    return iter(loader)


def _together(samples: list[tuple[tuple[torch.Tensor, Target] | None, list[str]]]) -> tuple[Batch, list[str]]:
    """Pictures and targets as lists: sizes differ."""
    pictures, targets = [], []
    for sample, _ in samples:
        if sample is not None:
            pictures.append(sample[0])
            targets.append(sample[1])
    return Batch((pictures, targets), len(pictures), len(pictures)), [why for _, broken in samples for why in broken]
