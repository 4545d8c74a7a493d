"""No normalization, the control that fails (UN paper, Table 1)."""

from torch import Tensor

from normkit.kernels import rows
from normkit.norms._base import RowNorm


class NoNorm(RowNorm):
    """The identity; with `affine=True`, `weight * x + bias`.

    >>> import torch
    >>> NoNorm(2)(torch.tensor([1.0, 3.0])).tolist()
    [1.0, 3.0]
    """

    offline = True  # nothing is computed at inference, so it folds

    def __init__(self, dim: int, *, eps: float = 1e-5, affine: bool = False, bias: bool = True):
        super().__init__(dim, eps=eps, affine=affine, bias=bias)

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        return x if self.weight is None else rows.affine(x, self.weight, self.bias).to(x.dtype)
