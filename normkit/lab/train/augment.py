"""Pictures as a classifier is shown them: cropped, mirrored, disturbed, mixed, normalized.

torchvision crops, mirrors, erases and mixes; timm has the RandAugment that Vision Transformers are trained with. All
of them draw from global generators, so a batch is made with those set to a seed of its own, and set back: a batch is a
function of the run's seed and its number, whichever process makes it.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit.lab.data.images import Album
from normkit.lab.models.torchvision_ops import load_torchvision
from normkit.lab.train.config import Images

NOISE: Any = "random"  # of v2.RandomErasing, which is annotated to take numbers only
SHARP = 4  # times the model's size: a smaller picture would show in the smallest crop, 8 % of its area
FILL = 0.45  # of the picture's size: the longest way that RandAugment moves it, as timm has it


class Views:
    """Makes tensors `[B, 3, size, size]` of pictures, and of their classes what the loss takes: numbers or shares."""

    def __init__(self, settings: Images, album: Album, size: int):
        load_torchvision()
        from torchvision.transforms import v2

        classes = len(album.vocabularies["classes"].plain())
        self.least = SHARP * size  # pixels a side that a large picture has to have
        self.mean, self.std = (torch.tensor(value).view(3, 1, 1) for value in (album.mean, album.std))
        self.train_view = v2.Compose(_training(settings, size, album.mean))
        self.erase = v2.RandomErasing(settings.erase, value=NOISE) if settings.erase else None
        bicubic = v2.InterpolationMode.BICUBIC
        whole = [v2.Resize(round(size / settings.test_crop), bicubic), v2.CenterCrop(size), v2.PILToTensor()]
        self.test_view = v2.Compose(whole)
        ways = [(settings.mixup, v2.MixUp), (settings.cutmix, v2.CutMix)]
        made = [way(alpha=alpha, num_classes=classes) for alpha, way in ways if alpha]
        shares = [1 - settings.mix_switch, settings.mix_switch]
        self.mix = v2.RandomChoice(made, shares) if len(made) == 2 else made[0] if made else None
        self.mix_prob, self.classes = settings.mix_prob, classes

    def training(self, pictures: Sequence[Any], labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """As the run says; the same for the same seed."""
        with chance(seed):
            images = self._normal([self.train_view(picture) for picture in pictures])
            if self.erase is not None:
                images = torch.stack([self.erase(image) for image in images])
            if self.mix is not None:
                if float(torch.rand(())) < self.mix_prob:
                    return self.mix(images, labels)
                labels = torch.nn.functional.one_hot(labels, self.classes).to(images)
            return images, labels

    def testing(self, pictures: Sequence[Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        """The middle of each picture."""
        return self._normal([self.test_view(picture) for picture in pictures]), labels

    def _normal(self, pictures: list[Tensor]) -> Tensor:
        return torch.stack(pictures).float().div_(255).sub_(self.mean).div_(self.std)


def _training(settings: Images, size: int, mean: tuple[float, float, float]) -> list[Any]:
    """From a picture of PIL to uint8 `[3, size, size]`."""
    from torchvision.transforms import v2

    bicubic = v2.InterpolationMode.BICUBIC
    if settings.crop == "area":
        steps: list[Any] = [v2.RandomResizedCrop(size, interpolation=bicubic)]
    elif settings.crop == "pad":
        steps = [v2.Resize(size, bicubic), v2.RandomCrop(size, padding=settings.padding)]
    else:
        steps = [v2.Resize((size, size), bicubic)]
    if settings.flip:
        steps.append(v2.RandomHorizontalFlip(settings.flip))
    if settings.rand_augment:
        from timm.data.auto_augment import rand_augment_transform

        color = tuple(round(255 * value) for value in mean)
        given = {"translate_const": int(size * FILL), "img_mean": color}
        steps.append(rand_augment_transform(settings.rand_augment, given))
    return [*steps, v2.PILToTensor()]


@contextlib.contextmanager
def chance(seed: int) -> Iterator[None]:
    """The global generators of PyTorch (CPU), NumPy and Python as of a seed; afterwards as they were.

    >>> with chance(1):
    ...     first = torch.rand(())
    >>> with chance(1):
    ...     print(bool(torch.rand(()) == first))
    True
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
