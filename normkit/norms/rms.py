"""Root mean square normalization (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from typing import Literal

from torch import Tensor

from normkit.kernels import ops
from normkit.norms._base import RowNorm
from normkit.norms._options import Count, option


class RMSNorm(RowNorm):
    """Divide each token by its root mean square: `y = weight * x / sqrt(mean(x^2) + eps)`.

    Args:
        bias: Learn a `bias`; off, as in the paper.
        eps_at: "inside" the root, as in today's models, or "outside", `x / (rms + eps)`, as in the authors' code.
        groups: Divide each of so many groups of neighboring channels by its own root mean square, as Mamba 2 does.

    >>> import torch
    >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 3.0]])).round(decimals=4).tolist()
    [[1.0, 1.0]]
    >>> RMSNorm(4, eps=0.0, groups=2)(torch.tensor([[3.0, 3.0, 5.0, -5.0]])).round(decimals=4).tolist()
    [[1.0, 1.0, 1.0, -1.0]]
    """

    with_bias: bool = option(default=False, alias="bias")
    eps_at: Literal["inside", "outside"] = "inside"
    groups: Count = 1

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        kind = "rms" if self.eps_at == "inside" else "rms_plus_eps"
        return ops.row_norm(x, self.weight, self.bias, kind, self.eps, self.groups)
