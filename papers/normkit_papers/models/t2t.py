"""T2T-ViT (Yuan et al. 2021): three merges of neighbouring tokens, then a slim ViT."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.norms import LayerNorm
from normkit_papers.models.blocks import place_norms, sinusoids
from normkit_papers.models.config import Model
from normkit_papers.models.torchvision_ops import load_torchvision

SPLITS = ((7, 4, 2), (3, 2, 1), (3, 2, 1))  # window, stride and padding of each soft split: 224 to 56, 28, 14 a side
STRIDE = 16  # of all splits together
PERFORMER_DROPOUT = 0.1  # as in the authors' code, whatever the recipe
STD = 0.02  # of all matrices at the start


class T2TViT(nn.Module):
    """Soft splits with performers between them, a class token, and timm's Transformer layers.

    A final norm and a linear layer of the class token follow.

    The sizes are those of T2T-ViT-14, 21.5 M parameters. Norms are before each block, also in the performers, and the
    final one reads all tokens, as in the authors' code. `config` places them; its `layer_drop` is the drop path of the
    last layer, to which it rises from 0. ValueError where `image_size` is not a multiple of 16.

    >>> model = T2TViT(Model(image_size=32, norm="un"), classes=10, width=24, depth=1, heads=2, token_width=8)
    >>> model(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    positions: Tensor

    def __init__(
        self, config: Model, classes: int, width: int = 384, depth: int = 14, heads: int = 6, ratio: int = 3,
        token_width: int = 64,
    ):  # fmt: skip
        super().__init__()
        load_torchvision()
        from timm.models.vision_transformer import Block

        if config.image_size % STRIDE:
            raise ValueError(f"image_size of T2T-ViT must be a multiple of {STRIDE}; got {config.image_size}")
        self.image_size = config.image_size
        (first, *_), (second, *_), (third, *_) = SPLITS
        self.performers = nn.ModuleList(
            [Performer(3 * first**2, token_width), Performer(token_width * second**2, token_width)]
        )
        self.project = nn.Linear(token_width * third**2, width)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        count = (config.image_size // STRIDE) ** 2 + 1
        self.register_buffer("positions", sinusoids(count, width), persistent=False)
        drops = torch.linspace(0, config.layer_drop, depth).tolist()
        self.layers = nn.Sequential(
            *(Block(width, heads, ratio, drop_path=drop, norm_layer=nn.LayerNorm) for drop in drops)
        )
        self.final_norm = LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.class_token, std=STD)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        place_norms(self, config)

    def forward(self, images: Tensor) -> Tensor:
        """Scores `[B, classes]` of `images [B, 3, image_size, image_size]`."""
        if images.shape[-2:] != (self.image_size, self.image_size):
            size = " x ".join(map(str, images.shape[-2:]))
            raise ValueError(f"this T2T-ViT was made for images of image_size={self.image_size}; got {size}")
        x = images
        for performer, (window, stride, padding) in zip(self.performers, SPLITS[:2], strict=True):
            side = x.shape[-1] // stride
            x = performer(F.unfold(x, window, stride=stride, padding=padding).transpose(1, 2))
            x = x.transpose(1, 2).unflatten(2, (side, side))
        window, stride, padding = SPLITS[2]
        x = self.project(F.unfold(x, window, stride=stride, padding=padding).transpose(1, 2))
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        return self.head(self.final_norm(self.layers(x))[:, 0])


class Performer(nn.Module):
    """Linear attention with one head (Choromanski et al. 2021), then a feed-forward block.

    `exp(q . k) = E[f(q) . f(k)]` for `f(x) = exp(W x - |x|^2 / 2) / sqrt(m)` with m random orthogonal rows W, so that
    attention over N tokens costs N m. The width changes, so that the residual is that of the values.
    """

    features: Tensor

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.norm1 = LayerNorm(channels)
        self.kqv = nn.Linear(channels, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = LayerNorm(width)
        self.inner, self.outer = nn.Linear(width, width), nn.Linear(width, width)
        self.dropout = nn.Dropout(PERFORMER_DROPOUT)
        count = width // 2
        self.register_buffer("features", nn.init.orthogonal_(torch.empty(count, width)) * count**0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`x [B, N, channels]` to `[B, N, width]`."""
        key, query, value = self.kqv(self.norm1(x)).chunk(3, -1)
        x = value + self.dropout(self.out(self._mix(key, query, value)))
        return x + self.dropout(self.outer(F.gelu(self.inner(self.norm2(x)))))

    def _mix(self, key: Tensor, query: Tensor, value: Tensor) -> Tensor:
        """The attention, in float32.

        What is taken off the exponents cancels, and keeps them from overflowing.
        """
        with torch.autocast(value.device.type, enabled=False):
            wide = torch.promote_types(value.dtype, torch.float32)
            logs = [x.to(wide) @ self.features.to(wide).T - x.to(wide).square().sum(-1, True) / 2 for x in (key, query)]
            key = (logs[0] - logs[0].detach().amax((1, 2), True)).exp()
            query = (logs[1] - logs[1].detach().amax(2, True)).exp()
            mixed = query @ (key.transpose(1, 2) @ value.to(wide))
            return (mixed / (query @ key.sum(1)[..., None]).clamp(min=1e-8)).to(value.dtype)
