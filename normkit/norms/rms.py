"""Root mean square normalization (Zhang & Sennrich 2019, arXiv:1910.07467)."""

from typing import Literal

from torch import Tensor

from normkit.kernels import rows
from normkit.norms._base import RowNorm
from normkit.norms._require import require


class RMSNorm(RowNorm):
    """Divide each token by its root mean square: `y = weight * x / sqrt(mean(x^2) + eps)`.

    `eps_at="outside"` is the authors' code, `x / (rms + eps)`; "inside" is what models use today. No bias by default.

    >>> import torch
    >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 3.0]])).round(decimals=4).tolist()
    [[1.0, 1.0]]
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = False,
        eps_at: Literal["inside", "outside"] = "inside",
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias)
        require(eps_at in ("inside", "outside"), "eps_at", eps_at, '"inside" or "outside"')
        self.eps_at = eps_at

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        return rows.rms(x, self.weight, self.bias, self.eps, inside=self.eps_at == "inside")
