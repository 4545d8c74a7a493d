"""Classifiers of pictures by name: `[B, 3, size, size]` to `[B, classes]`."""

import difflib
from collections.abc import Callable

from torch import nn

from normkit.models.config import Model
from normkit.models.vision import TinyViT


def classifier(config: Model, classes: int) -> nn.Module:
    """The model that `config.arch` names, with its norms placed; ValueError with the nearest name if there is none.

    >>> config = Model(arch="tiny_vit", width=8, hidden=16, depth=1, heads=2, image_size=8, norm="un")
    >>> type(classifier(config, classes=10)).__name__
    'TinyViT'
    """
    if config.arch not in ARCHES:
        close = difflib.get_close_matches(config.arch, ARCHES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"there is no model {config.arch!r}{hint}; there are {', '.join(ARCHES)}")
    return ARCHES[config.arch](config, classes)


def tiny_vit(config: Model, classes: int) -> TinyViT:
    """Our small Vision Transformer, of the sizes that the configuration says."""
    return TinyViT(config, config.image_size, config.patch, channels=3, classes=classes)


ARCHES: dict[str, Callable[[Model, int], nn.Module]] = {"tiny_vit": tiny_vit}
"""By name; what one makes takes colours normalized by mean and deviation."""
