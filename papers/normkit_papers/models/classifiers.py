"""Image classifiers by name: `[batch, 3, size, size]` to `[batch, classes]`."""

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit._util import pick
from normkit.norms import LayerNorm
from normkit_papers.models.blocks import Stack, initialize, place_norms
from normkit_papers.models.config import Model
from normkit_papers.models.t2t import T2TViT
from normkit_papers.models.torchvision_ops import load_torchvision

WIDTHS = (16, 32, 64)  # of ResNet-20
BLOCKS = 3  # a width


def classifier(config: Model, classes: int) -> nn.Module:
    """Build the model that `config.arch` names, with its norms.

    Raises:
        ValueError: If the name is unknown; the message has the nearest one.

    >>> config = Model(arch="tiny_vit", width=8, hidden=16, depth=1, heads=2, image_size=8, norm="un")
    >>> type(classifier(config, classes=10)).__name__
    'TinyViT'
    """
    return pick(ARCHES, config.arch, "model")(config, classes)


class TinyViT(nn.Module):
    """A small Vision Transformer for small images (Dosovitskiy et al. 2021).

    Patches to tokens, learned positions, an encoder, the mean of its tokens to classes.

    >>> model = TinyViT(Model(width=8, hidden=16, depth=1, heads=2), image_size=8, patch=2, channels=1, classes=10)
    >>> model(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self, config: Model, image_size: int, patch: int, channels: int, classes: int):
        super().__init__()
        if image_size % patch:
            raise ValueError(f"patch must divide image_size={image_size}; got {patch}")
        self.config = config
        self.patches = nn.Conv2d(channels, config.width, patch, patch)
        self.positions = nn.Parameter(torch.randn((image_size // patch) ** 2, config.width) * 0.02)
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Stack(config, config.depth)
        self.head = nn.Linear(config.width, classes)
        initialize(self, config.init)
        place_norms(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `[B, classes]` of `images [B, channels, size, size]`."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.encoder(self.dropout(x)).mean(1))


def per_pixel(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a channels-last norm to `x [batch, channels, height, width]`."""
    return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut without parameters (option A).

    The shortcut takes every second pixel; new channels are zero.
    """

    def __init__(self, channels: int, out: int):
        super().__init__()
        self.stride, self.grown = out // channels, out - channels
        self.conv1 = nn.Conv2d(channels, out, 3, self.stride, 1, bias=False)
        self.norm1 = LayerNorm(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = LayerNorm(out)

    def forward(self, x: Tensor) -> Tensor:
        """`relu(x + norm(conv(relu(norm(conv(x))))))`."""
        inner = per_pixel(self.norm2, self.conv2(F.relu(per_pixel(self.norm1, self.conv1(x)))))
        short = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.grown)) if self.grown else x
        return F.relu(inner + short)


class ResNet20(nn.Module):
    """ResNet-20 for CIFAR (He et al. 2016, section 4.2), as in PowerNorm's Figure 2.

    A convolution, three times three blocks of 16, 32 and 64 channels, the mean over pixels, a linear layer.

    >>> sum(p.numel() for p in ResNet20(Model(norm="batch"), classes=10).parameters())
    269722
    """

    def __init__(self, config: Model, classes: int):
        super().__init__()
        self.conv = nn.Conv2d(3, WIDTHS[0], 3, 1, 1, bias=False)
        self.norm = LayerNorm(WIDTHS[0])
        pairs = [(WIDTHS[0], WIDTHS[0])] * BLOCKS
        for before, after in pairwise(WIDTHS):
            pairs += [(before, after), *[(after, after)] * (BLOCKS - 1)]
        self.blocks = nn.Sequential(*(BasicBlock(*pair) for pair in pairs))
        self.head = nn.Linear(WIDTHS[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        place_norms(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `[B, classes]` of `images [B, 3, height, width]`."""
        x = F.relu(per_pixel(self.norm, self.conv(images)))
        return self.head(self.blocks(x).mean((2, 3)))


def tiny_vit(config: Model, classes: int) -> TinyViT:
    """Build `TinyViT` with the sizes of the configuration."""
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
