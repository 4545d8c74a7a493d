"""A small Vision Transformer for small images (Dosovitskiy et al. 2021)."""

import torch
from torch import Tensor, nn

from normkit_papers.models.blocks import Stack, place_norms
from normkit_papers.models.config import Model
from normkit_papers.models.initialize import initialize


class TinyViT(nn.Module):
    """Patches to tokens, learned positions, an encoder, the mean of its tokens to classes.

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
