"""The rest of a norm after folding: a multiply-add, an addition, or nothing."""

import torch
from torch import Tensor, nn


class Identity(nn.Identity):
    """The identity, for models that call their norms with a mask."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Return `x`."""
        return x


class Affine(nn.Module):
    """Compute `x * weight + bias` per channel; either may be None.

    Args:
        weight: Factor of each channel, `[dim]`, or None.
        bias: Addend of each channel, `[dim]`, or None.
        channel_dim: Axis of the channels: -1 for `[batch, time, channels]`, 1 for `[batch, channels, ...]`.

    Examples:
        >>> Affine(torch.tensor([2.0]), torch.tensor([1.0]))(torch.tensor([[3.0]])).item()
        7.0
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, channel_dim: int = -1):
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.channel_dim = channel_dim

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the multiply-add, in the type of `x`; a mask changes nothing."""
        shape = [1] * x.dim()
        shape[self.channel_dim] = -1
        weight, bias = (None if each is None else each.view(shape) for each in (self.weight, self.bias))
        if weight is None or bias is None:
            y = x * weight if weight is not None else x if bias is None else x + bias
        else:
            y = torch.addcmul(bias, x, weight)
        return y if y.dtype is x.dtype else y.to(x.dtype)  # parameters in float32, as of a norm in a model in bfloat16
