"""Dynamic Tanh (Zhu, Chen, He, LeCun & Liu 2025, arXiv:2503.10622)."""

import torch
from torch import Tensor, nn

from normkit.kernels import reference
from normkit.norms._base import RowNorm
from normkit.norms._options import Positive


class DyT(RowNorm):
    """Squash each value: `y = weight * tanh(a * x) + bias`, with one learned scalar `a`.

    It has no statistics. tanh cannot be folded into a Linear.

    Args:
        eps: Unused; accepted as by every norm.
        alpha: Initial value of `a`; 0.5 is the authors' default outside language models.

    >>> import torch
    >>> DyT(2)(torch.zeros(1, 2)).tolist()
    [[0.0, 0.0]]
    """

    alpha: Positive = 0.5

    def build(self) -> None:  # noqa: D102
        super().build()
        self.a = nn.Parameter(torch.full((1,), float(self.alpha)))

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        nn.init.constant_(self.a, self.alpha)

    def squash(self, x: Tensor) -> Tensor:
        """Return `tanh(a * x)`."""
        return torch.tanh(x * self.a)

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        wide = x.to(reference.wide_type(x, self.a))
        return reference.affine(self.squash(wide), self.weight, self.bias).to(x.dtype)
