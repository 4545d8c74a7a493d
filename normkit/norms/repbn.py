"""RepBN (Guo et al. 2024, "SLAB", arXiv:2405.11582): BatchNorm with a learned share of its input."""

from typing import Literal

import torch
from torch import Tensor, nn

from normkit.norms.batch import BatchNorm


class RepBN(BatchNorm):
    """BatchNorm plus a learned multiple of its input: `y = BN(x) + a * x`, one scalar `a` that starts at 1.

    At inference both are affine, so it folds: `scale = weight / sqrt(var + eps) + a`. In SLAB it takes over from
    LayerNorm in the course of training, which `normkit.transforms.blend` does. Options and state are BatchNorm's.

    >>> RepBN(1, eps=0.0)(torch.tensor([[1.0], [3.0]])).tolist()
    [[0.0], [4.0]]
    """

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        sync: bool = False,
        steps_per_update: int = 1,
        alpha: float = 0.9,
        running_var: Literal["unbiased", "biased"] = "unbiased",
    ):
        super().__init__(
            dim, eps=eps, affine=affine, bias=bias, sync=sync, steps_per_update=steps_per_update, alpha=alpha,
            running_var=running_var,
        )  # fmt: skip
        self.a = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        nn.init.ones_(self.a)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: D102
        y = super().forward(x, mask)
        return (y + self.a * x).to(x.dtype) if self.training else y

    def _affine(self) -> tuple[Tensor, Tensor]:
        scale, shift = super()._affine()
        return scale + self.a, shift
