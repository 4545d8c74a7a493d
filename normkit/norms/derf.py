"""Derf (Chen, Lu, Zhu, Sun & Liu 2025, arXiv:2512.10938)."""

import torch
from torch import Tensor, nn

from normkit.norms.dyt import DyT


class Derf(DyT):
    """Squash each value by the error function: `y = weight * erf(a * x + s) + bias`.

    Two learned scalars: `a` starts at `alpha`, the shift `s` at 0. It has no statistics and does not fold.

    Args:
        eps: Unused; accepted as by every norm.
        alpha: Initial value of `a`; 0.5 as in the released code.

    >>> Derf(2)(torch.zeros(1, 2)).tolist()
    [[0.0, 0.0]]
    """

    def build(self) -> None:  # noqa: D102
        super().build()
        self.s = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        nn.init.zeros_(self.s)

    def squash(self, x: Tensor) -> Tensor:
        """Return `erf(a * x + s)`."""
        return torch.erf(x * self.a + self.s)
