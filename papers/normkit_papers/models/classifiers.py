"""Image classifiers by name: `[batch, 3, size, size]` to `[batch, classes]`."""

from collections.abc import Callable

from torch import nn

from normkit._util import pick
from normkit_papers.models.blocks import place_norms
from normkit_papers.models.config import Model
from normkit_papers.models.resnet import ResNet20
from normkit_papers.models.t2t import T2TViT
from normkit_papers.models.torchvision_ops import load_torchvision
from normkit_papers.models.vit import TinyViT


def classifier(config: Model, classes: int) -> nn.Module:
    """Build the model that `config.arch` names, with its norms.

    Raises:
        ValueError: If the name is unknown; the message has the nearest one.

    >>> config = Model(arch="tiny_vit", width=8, hidden=16, depth=1, heads=2, image_size=8, norm="un")
    >>> type(classifier(config, classes=10)).__name__
    'TinyViT'
    """
    return pick(ARCHES, config.arch, "model")(config, classes)


def tiny_vit(config: Model, classes: int) -> TinyViT:
    """Build the small Vision Transformer of `vit.py`, with the sizes of the configuration."""
    return TinyViT(config, config.image_size, config.patch, channels=3, classes=classes)


def swin_t(config: Model, classes: int) -> nn.Module:
    """Build torchvision's Swin-T (Liu et al. 2021); `config.layer_drop` is its drop path."""
    load_torchvision()
    from torchvision.models.swin_transformer import SwinTransformer

    model = SwinTransformer(
        [4, 4], 96, [2, 2, 6, 2], [3, 6, 12, 24], [7, 7], stochastic_depth_prob=config.layer_drop, num_classes=classes
    )
    place_norms(model, config)
    return model


ARCHES: dict[str, Callable[[Model, int], nn.Module]] = {
    "tiny_vit": tiny_vit,
    "resnet20": ResNet20,
    "t2t_vit_14": T2TViT,
    "swin_t": swin_t,
}
"""By name; what one makes takes colours normalized by mean and deviation."""
