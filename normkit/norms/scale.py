"""ScaleNorm (Nguyen & Salazar 2019, arXiv:1910.05895, Eq. 5)."""

import torch
from torch import Tensor, nn

from normkit.kernels import ops
from normkit.norms._base import RowNorm
from normkit.norms._options import option


class ScaleNorm(RowNorm):
    """Give each token one learned length: `y = g * x / max(||x||_2, eps)`.

    The parameter `weight`, `[1]`, is g, the same for all channels; it starts at sqrt(dim). The maximum cuts the norm's
    own gradient for tokens shorter than `eps`, as in the paper's code: a token of zeros gets `g / eps * dy`; mask it.

    Args:
        eps: Lower bound of the length; 1e-5 as in the authors' code.
        bias: Learn a `bias`; off, as in the paper.
        learn: Learn g; False keeps it at sqrt(dim) (the paper's Table 7); without `affine` it is 1.

    >>> import torch
    >>> ScaleNorm(4)(torch.ones(1, 4)).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """

    with_bias: bool = option(default=False, alias="bias")
    learn: bool = True

    def build(self) -> None:  # noqa: D102
        super().build()
        self.weight = nn.Parameter(torch.empty(1)) if self.affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        if self.weight is not None:
            nn.init.constant_(self.weight, self.dim**0.5)
            self.weight.requires_grad_(self.learn)

    def gains(self) -> nn.Parameter:
        """Return the length as RMSNorm's weight, `g / sqrt(dim)` for every channel."""
        gains = self.split().scale.detach() / self.dim**0.5
        return nn.Parameter(gains, self.weight is not None and self.weight.requires_grad)

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        return ops.row_norm(x, self.weight, self.bias, "scale", self.eps)
