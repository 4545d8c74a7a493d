"""No normalization, the control experiment (UN paper, Table 1)."""

from torch import Tensor

from normkit.kernels import reference
from normkit.norms._base import RowNorm


class NoNorm(RowNorm):
    """The identity; with `affine=True`, `weight * x + bias`.

    Args:
        affine: Learn a `weight` (and a `bias`) per channel; off, so that no norm means no parameters.

    >>> import torch
    >>> NoNorm(2)(torch.tensor([1.0, 3.0])).tolist()
    [1.0, 3.0]
    """

    offline = True  # nothing is computed at inference, so it folds

    affine: bool = False

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        if self.weight is None:
            return x
        return reference.affine(x.to(reference.wide_type(x)), self.weight, self.bias).to(x.dtype)
