"""ScaleNorm (Nguyen & Salazar 2019, "Transformers without Tears", arXiv:1910.05895, Eq. 5)."""

import torch
from torch import Tensor, nn

from normkit.kernels import rows
from normkit.norms._base import RowNorm, Split
from normkit.norms._require import require


class ScaleNorm(RowNorm):
    """Give each token one learned length: `y = g * x / max(||x||_2, eps)`, one scalar g for the whole norm.

    `weight` is g, `[1]`, initialised to sqrt(dim); `learn=False` keeps it there (the paper's Table 7). With
    `unit_init=True` the parameter starts at 1 and is multiplied by sqrt(dim): the same functions, another effective
    learning rate. The clamp cuts the norm's own gradient for rows shorter than `eps`, as in the paper's code: a row of
    zeros gets `g / eps * dy`, large by intent of the formula, so keep a gradient away from rows that are all zero.

    >>> import torch
    >>> ScaleNorm(4)(torch.ones(1, 4)).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = False,
        learn: bool = True,
        unit_init: bool = False,
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias)
        require(isinstance(learn, bool), "learn", learn, "True or False")
        require(isinstance(unit_init, bool), "unit_init", unit_init, "True or False")
        self.learn, self.unit_init = learn, unit_init
        self._set_length()

    def weight_shape(self) -> tuple[int, ...]:
        """Shape of `weight`: one number for the whole norm."""
        return (1,)

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        self._set_length()

    def _set_length(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 if self.unit_init else self.dim**0.5)
            self.weight.requires_grad_(self.learn)

    def length(self) -> Tensor | None:
        """g, the length that tokens get."""
        return self.weight * self.dim**0.5 if self.weight is not None and self.unit_init else self.weight

    def gains(self) -> nn.Parameter:
        """The length as RMSNorm's gains, `g / sqrt(dim)` for every channel."""
        gains = self.split().scale.detach() / self.dim**0.5
        return nn.Parameter(gains, self.weight is not None and self.weight.requires_grad)

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        return rows.scale(x, self.length(), self.bias, self.eps)

    def split(self) -> Split:  # noqa: D102
        rest, scale, shift = super().split()
        length = self.length()
        return Split(rest, torch.ones_like(scale) if length is None else length.expand(self.dim), shift)
