"""Named runs on pictures; rows of RECIPES."""

import dataclasses
from collections.abc import Callable

from normkit.models.config import Model
from normkit.train.config import Images, Run


def cifar10_tiny_vit() -> Run:
    """CIFAR-10 with a tiny Vision Transformer: minutes on one CPU core.

    NORMKIT_DATA=FOLDER normkit train cifar10_tiny_vit --model.norm un
    """
    return Run(
        name="cifar10_tiny_vit",
        task="images",
        data="cifar10",
        model=Model(arch="tiny_vit", image_size=32, patch=8, width=96, hidden=192, depth=4, heads=4),
        images=Images(held_out=2000),
        steps=500,
        batch_tokens=64,
        bucketing=False,
        lr=2e-3,
        weight_decay=0.05,
        label_smoothing=0.1,
        warmup=50,
        valid_every=250,
        checkpoint_every=250,
        threads=1,
    )


def cifar10_resnet20() -> Run:
    """CIFAR-10, its pictures at half their size, with ResNet-20 of PowerNorm's Figure 2: minutes on one CPU core.

    NORMKIT_DATA=FOLDER normkit train cifar10_resnet20 --model.norm batch
    """
    return dataclasses.replace(
        cifar10_tiny_vit(),
        name="cifar10_resnet20",
        model=Model(arch="resnet20", image_size=16, norm="batch"),
        images=Images(held_out=2000, padding=2, channels_last=True),
        steps=700,
        lr=5e-3,
        warmup=70,
        valid_every=350,
        checkpoint_every=350,
    )


IMAGE_RECIPES: dict[str, Callable[[], Run]] = {
    "cifar10_tiny_vit": cifar10_tiny_vit,
    "cifar10_resnet20": cifar10_resnet20,
}
"""By name."""
