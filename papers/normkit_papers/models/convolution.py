"""Lightweight and dynamic convolutions over time (Wu et al. 2019, arXiv:1901.10430)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Convolution(nn.Module):
    """Weighted sums over neighbouring tokens, in place of self-attention.

    A linear map with a gated linear unit comes first, another linear map last. The channels of a head share their
    weights, a softmax over the `kernel` positions: learned numbers (lightweight), or, if `dynamic`, a linear function
    of the token at hand. Dropout of these weights is DropConnect. Positions outside of the sentence, and padding, are
    zeros, as in fairseq.

    Args:
        width: Channels.
        heads: Groups of channels with weights of their own.
        kernel: Positions in a sum, an odd number.
        dynamic: Compute the weights from each token.
        dropout: Fraction of weights that a training step sets to zero.

    >>> Convolution(8, heads=2, kernel=3, dynamic=True, dropout=0.1)(torch.zeros(2, 5, 8))[0].shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, width: int, heads: int, kernel: int, dynamic: bool, dropout: float):
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(width, width)
        taps = heads * kernel
        self.taps = nn.Linear(width, taps, bias=False) if dynamic else nn.Parameter(torch.zeros(taps))
        self.dropout = nn.Dropout(dropout)

    def mix(
        self, x: Tensor, past: tuple[Tensor, ...] | None, real: Tensor | None, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Convolve; see `Attention.mix`. With `past`, a token is mixed with earlier ones only."""
        y, kept = self(x, real, causal or past is not None, past[0] if past else None)
        return y, (kept,)

    def forward(
        self, x: Tensor, real: Tensor | None = None, causal: bool = False, past: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Convolve over time.

        Args:
            x: `[batch, time, width]`.
            real: True at tokens that are no padding, `[batch, time]`.
            causal: Sum over a token and earlier ones; by default the token is in the middle.
            past: What an earlier call returned for the tokens before `x`.

        Returns:
            The output, and what a causal call for the next tokens takes as `past`.
        """
        y = F.glu(self.inner(x), -1)
        logits = self.taps(y) if isinstance(self.taps, nn.Linear) else self.taps
        weights = self.dropout(logits.unflatten(-1, (self.heads, self.kernel)).softmax(-1))
        y = y if real is None else y.masked_fill(~real[..., None], 0)
        seen = y if past is None else torch.cat([past, y], 1)
        before, after = (self.kernel - 1, 0) if causal else (self.kernel // 2, self.kernel // 2)
        padded = F.pad(seen, (0, 0, before - (seen.shape[1] - y.shape[1]), after))
        band = _band(weights.expand(len(y), y.shape[1], -1, -1).transpose(1, 2))
        mixed = (band @ padded.unflatten(2, (self.heads, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)
        return self.outer(mixed), seen[:, max(0, seen.shape[1] - self.kernel + 1) :]


def _band(weights: Tensor) -> Tensor:
    """Matrices `[..., time, time + kernel - 1]` with row t of the weights from column t on.

    One product with such a matrix is several times faster than a sum over windows.
    """
    time, kernel = weights.shape[-2:]
    rows = F.pad(weights, (0, time)).flatten(-2)  # a row of a band is one number shorter, so each begins one later
    return rows[..., : time * (time + kernel - 1)].unflatten(-1, (time, time + kernel - 1))
