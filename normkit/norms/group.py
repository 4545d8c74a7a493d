"""Group normalization (Wu & He 2018, arXiv:1803.08494), of each token by default."""

from typing import Literal

from torch import Tensor

from normkit.kernels import ops, reference
from normkit.norms._base import RowNorm
from normkit.norms._options import Count


class GroupNorm(RowNorm):
    """LayerNorm of each of `groups` groups of neighboring channels.

    `weight` and `bias` are per channel; `groups=1` is LayerNorm.

    Args:
        groups: Number of groups, a divisor of `dim`; 8 is a common number of heads (PowerNorm paper, footnote 5).
        over: "token" takes statistics over one token's channels, as the PowerNorm repository. "sample" is the form
            for images: over all real positions of `x [batch, ..., dim]`, so an output depends on other positions.

    >>> import torch
    >>> GroupNorm(4, groups=2, eps=0.0)(torch.tensor([[1.0, 3.0, 10.0, 30.0]])).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    groups: Count = 8
    over: Literal["token", "sample"] = "token"

    @property
    def whole(self) -> str:  # type: ignore[override]  # noqa: D102
        return self.over

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        if self.over == "token":
            return ops.row_norm(x, self.weight, self.bias, "layer", self.eps, self.groups)
        if x.dim() < 2:
            raise ValueError(f'over="sample" takes x[batch, ..., {self.dim}]; got shape {tuple(x.shape)}')
        return reference.group_sample(x, self.weight, self.bias, self.eps, self.groups, mask)
