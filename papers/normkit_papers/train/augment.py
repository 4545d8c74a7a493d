"""Augmentation of images for a classifier, as `Images` describes it.

torchvision crops, flips, erases and mixes; timm has the RandAugment that Vision Transformers are trained with. All of
them draw from global generators, so these are seeded for each batch and restored afterwards. A batch depends on the
run's seed and its number only, whichever process makes it.
"""

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit_papers.data.images import ImageData
from normkit_papers.models.torchvision_ops import load_torchvision
from normkit_papers.train.settings import Images

NOISE: Any = "random"  # of v2.RandomErasing, whose annotation allows numbers only
SHARP = 4  # times the model's size: a smaller image would be visible in the smallest crop, 8 % of its area
FILL = 0.45  # of the image's size: the longest translation of RandAugment, as in timm


class ImageAugmentation:
    """Makes tensors `[batch, 3, size, size]` of images, and labels or label mixtures."""

    def __init__(self, settings: Images, data: ImageData, size: int):
        load_torchvision()
        from torchvision.transforms import v2

        classes = len(data.vocabularies["classes"].plain())
        self.least = SHARP * size  # pixels per side at which large images are decoded, at least
        self.mean, self.std = (torch.tensor(value).view(3, 1, 1) for value in (data.mean, data.std))
        self.train_view = v2.Compose(_training(settings, size, data.mean))
        self.erase = v2.RandomErasing(settings.erase, value=NOISE) if settings.erase else None
        bicubic = v2.InterpolationMode.BICUBIC
        whole = [v2.Resize(round(size / settings.test_crop), bicubic), v2.CenterCrop(size), v2.PILToTensor()]
        self.test_view = v2.Compose(whole)
        kinds = [(settings.mixup, v2.MixUp), (settings.cutmix, v2.CutMix)]
        mixes = [kind(alpha=alpha, num_classes=classes) for alpha, kind in kinds if alpha]
        shares = [1 - settings.mix_switch, settings.mix_switch]
        self.mix = v2.RandomChoice(mixes, shares) if len(mixes) == 2 else mixes[0] if mixes else None
        self.mix_prob, self.classes = settings.mix_prob, classes

    def train(self, images: Sequence[Any], labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Augment a training batch; the same seed gives the same batch."""
        with seeded(seed):
            batch = self._normalize([self.train_view(image) for image in images])
            if self.erase is not None:
                batch = torch.stack([self.erase(image) for image in batch])
            if self.mix is not None:
                if float(torch.rand(())) < self.mix_prob:
                    return self.mix(batch, labels)
                labels = torch.nn.functional.one_hot(labels, self.classes).to(batch)
            return batch, labels

    def test(self, images: Sequence[Any], labels: Tensor) -> tuple[Tensor, Tensor]:
        """Crop the centre of each image."""
        return self._normalize([self.test_view(image) for image in images]), labels

    def _normalize(self, images: list[Tensor]) -> Tensor:
        return torch.stack(images).float().div_(255).sub_(self.mean).div_(self.std)


def _training(settings: Images, size: int, mean: tuple[float, float, float]) -> list[Any]:
    """Return transforms of a PIL image to uint8 `[3, size, size]`."""
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
        try:
            steps.append(rand_augment_transform(settings.rand_augment, given))
        except (AssertionError, ValueError):  # timm's have no name of the setting
            example = "a name of timm, such as rand-m9-mstd0.5-inc1"
            raise ValueError(f"images.rand_augment must be {example}; got {settings.rand_augment!r}") from None
    return [*steps, v2.PILToTensor()]


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators inside the block, and restore them after it.

    They are those of PyTorch (CPU), NumPy and Python.

    >>> with seeded(1):
    ...     first = torch.rand(())
    >>> with seeded(1):
    ...     print(bool(torch.rand(()) == first))
    True
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002
    random.seed(seed)
    try:
        yield
    finally:  # Lightning's isolate_rng restores nothing after an exception, such as Ctrl-C
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
