"""Layer normalization (Ba, Kiros & Hinton 2016, arXiv:1607.06450)."""

from torch import Tensor

from normkit.kernels import ops
from normkit.norms._base import RowNorm


class LayerNorm(RowNorm):
    """Center and scale each token: `y = weight * (x - mean) / sqrt(var + eps) + bias`.

    Mean and biased variance over the channels of one token (UN paper, section 3.1). The reference for every other
    norm. Its statistics are computed for every token, at inference too, so only `weight` and `bias` can be folded.

    >>> import torch
    >>> LayerNorm(2, eps=0.0)(torch.tensor([[1.0, 3.0]])).tolist()
    [[-1.0, 1.0]]
    """

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:  # noqa: D102
        return ops.row_norm(x, self.weight, self.bias, "layer", self.eps)
