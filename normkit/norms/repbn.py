"""RepBN (Guo et al. 2024, "SLAB", arXiv:2405.11582, section 3.2)."""

import torch
from torch import Tensor, nn

from normkit.kernels import reference
from normkit.norms._base import Split
from normkit.norms.batch import BatchNorm


class RepBN(BatchNorm):
    """BatchNorm plus a learned multiple of its input: `y = BN(x) + a * x`.

    The scalar `a` starts at 1. At inference both terms are affine, so the norm folds:
    `scale = weight / sqrt(var + eps) + a`. SLAB replaces LayerNorm by it gradually during training. Options and state
    are those of BatchNorm.

    >>> RepBN(1, eps=0.0)(torch.tensor([[1.0], [3.0]])).tolist()
    [[0.0], [4.0]]
    """

    def build(self) -> None:  # noqa: D102
        super().build()
        self.a = nn.Parameter(torch.ones(1))

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        nn.init.ones_(self.a)

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        if not self.training:
            scale, shift = reference.scale_and_shift(self.running, self.weight, self.bias, self.eps)
            return reference.scale_shift(x, scale + self.a, shift)
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        return (super().normalize(wide, mask) + self.a * wide).to(x.dtype)

    def split(self) -> Split:  # noqa: D102
        rest, scale, shift = super().split()
        return Split(rest, scale + self.a, shift)
