"""ResNet-20 for CIFAR (He et al. 2016, section 4.2), the network of PowerNorm's Figure 2."""

from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn

from normkit.norms import LayerNorm
from normkit_papers.models.blocks import place_norms
from normkit_papers.models.config import Model

WIDTHS = (16, 32, 64)
BLOCKS = 3  # a width


def per_pixel(norm: nn.Module, x: Tensor) -> Tensor:
    """Apply a channels-last norm to `x [batch, channels, height, width]`."""
    return norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Block(nn.Module):
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
    """ResNet-20 with 0.27 M parameters.

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
        self.blocks = nn.Sequential(*(Block(*pair) for pair in pairs))
        self.head = nn.Linear(WIDTHS[-1], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        place_norms(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `[B, classes]` of `images [B, 3, height, width]`."""
        x = F.relu(per_pixel(self.norm, self.conv(images)))
        return self.head(self.blocks(x).mean((2, 3)))
