"""Group normalization (Wu & He 2018, arXiv:1803.08494), per token unless asked otherwise."""

from typing import Literal

from torch import Tensor

from normkit.kernels import rows
from normkit.norms._base import RowNorm
from normkit.norms._require import require, require_count


class GroupNorm(RowNorm):
    """LayerNorm of each of `groups` runs of consecutive channels, with `weight` and `bias` per channel.

    `over="token"` (default, and the PowerNorm repository's GN) takes the statistics over one token's channels;
    `groups=1` is LayerNorm. `over="sample"` is the image form: `x` is `[batch, ..., dim]`, statistics also run over all
    real positions of a sample, so an output depends on the other positions.

    >>> import torch
    >>> GroupNorm(4, groups=2, eps=0.0)(torch.tensor([[1.0, 3.0, 10.0, 30.0]])).tolist()
    [[-1.0, 1.0, -1.0, 1.0]]
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        groups: int = 8,
        over: Literal["token", "sample"] = "token",
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias)
        require_count("groups", groups)
        require(dim % groups == 0, "groups", groups, f"a divisor of dim={dim}")
        require(over in ("token", "sample"), "over", over, '"token" or "sample"')
        self.groups, self.over = groups, over

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        if self.over == "token":
            return rows.group(x, self.weight, self.bias, self.eps, self.groups)
        if x.dim() < 2:
            raise ValueError(f'over="sample" takes x[batch, ..., {self.dim}]; got shape {tuple(x.shape)}')
        return rows.group_sample(x, self.weight, self.bias, self.eps, self.groups, mask)
