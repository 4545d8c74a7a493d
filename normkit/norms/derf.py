"""Derf (Chen, Lu, Zhu, Sun & Liu 2025, "Stronger Normalization-Free Transformers", arXiv:2512.10938)."""

import torch
from torch import Tensor, nn

from normkit.norms.dyt import DyT


class Derf(DyT):
    """Squash each value by the error function: `y = weight * erf(a * x + s) + bias`.

    Two learned scalars: `a` starts at `alpha`, the shift `s` at 0. Like DyT it has no statistics and does not fold.

    >>> Derf(2)(torch.zeros(1, 2)).tolist()
    [[0.0, 0.0]]
    """

    def __init__(self, dim: int, *, eps: float = 1e-5, affine: bool = True, bias: bool = True, alpha: float = 0.5):
        super().__init__(dim, eps=eps, affine=affine, bias=bias, alpha=alpha)
        self.s = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        nn.init.zeros_(self.s)

    def squash(self, x: Tensor) -> Tensor:
        """`erf(a * x + s)`."""
        return torch.erf(x * self.a + self.s)
