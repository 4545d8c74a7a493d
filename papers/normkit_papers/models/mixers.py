"""Blocks that mix the tokens of a text in place of dot-product attention.

Attention with relative positions and memory (Transformer-XL, Dai et al. 2019), dynamic convolutions (Wu et al. 2019),
multi-linear attention (tensorized Transformer, Ma et al. 2019). Each has the method `mix` of
`blocks.Attention`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RelativeAttention(nn.Module):
    """Causal attention by content and distance, also to the words before a segment.

    The score of word i for word j is `((q_i + a) k_j + (q_i + b) W r_(i-j)) / sqrt(d)` (section 3.3), with sines and
    cosines `r` of the distance, and `a`, `b` for each head. No word attends to later ones. `memory` are the numbers of
    words that the next segment remembers, in training and at inference.

    >>> block = RelativeAttention(width=6, heads=2, dropout=0.0)
    >>> segment, before = torch.zeros(2, 3, 6), torch.zeros(2, 5, 6)
    >>> block(segment, torch.cat([before, segment], 1)).shape
    torch.Size([2, 3, 6])
    """

    rates: Tensor

    def __init__(self, width: int, heads: int, dropout: float, memory: tuple[int, int] = (0, 0)):
        super().__init__()
        self.heads, self.dropout, self.memory = heads, dropout, memory
        self.query, self.key, self.value, self.place, self.out = (nn.Linear(width, width, bias=False) for _ in range(5))
        self.content_bias, self.place_bias = (nn.Parameter(torch.zeros(heads, 1, width // heads)) for _ in range(2))
        self.register_buffer("rates", 10_000 ** (-torch.arange(0, width, 2) / width), persistent=False)
        for linear in (self.query, self.key, self.value, self.place, self.out):
            nn.init.normal_(linear.weight, 0, 0.02)  # as the authors' code

    def mix(
        self, x: Tensor, past: tuple[Tensor, ...] | None, real: Tensor | None, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Attend to the memory and to `x`; see `Attention.mix`.

        What the next segment remembers has no gradient, and is the attention's input. In a pre-norm model it has
        passed the norm, which therefore measures each word once, in the segment where it is new.
        """
        seen = torch.cat([*past, x], 1) if past else x
        keep = self.memory[0] if self.training else self.memory[1]
        return self(x, seen), (seen[:, max(0, seen.shape[1] - keep) :].detach(),)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """Attend from `x [batch, time, width]` to `seen [batch, memory + time, width]`.

        `seen` ends with `x`.
        """
        time, length = x.shape[1], seen.shape[1]
        query, key, value = (self._split(y) for y in (self.query(x), self.key(seen), self.value(seen)))
        steps = torch.arange(length, device=x.device)
        angles = steps[:, None] * self.rates
        place = self._split(self.place(torch.cat([angles.sin(), angles.cos()], 1).to(x.dtype))[None])
        by_distance = (query + self.place_bias) @ place.transpose(-1, -2)  # [batch, heads, time, length]
        distance = steps[length - time :, None] - steps
        index = distance.clamp(min=0).expand(by_distance.shape)
        scores = (by_distance.gather(-1, index) * key.shape[-1] ** -0.5).masked_fill(distance < 0, -torch.inf)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query + self.content_bias, key, value, scores, dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Convolution(nn.Module):
    """Weighted sums over neighbouring tokens, in place of self-attention.

    A linear map with a gated linear unit comes first, another linear map last. The channels of a head share their
    weights, a softmax over the `kernel` positions of a linear function of the token at hand. Dropout of these weights
    is DropConnect. Positions outside of the sentence, and padding, are zeros, as in fairseq.

    >>> Convolution(8, heads=2, kernel=3, dropout=0.1)(torch.zeros(2, 5, 8))[0].shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, width: int, heads: int, kernel: int, dropout: float):
        super().__init__()
        self.heads, self.kernel = heads, kernel
        self.inner, self.outer = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.taps = nn.Linear(width, heads * kernel, bias=False)
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
        """Convolve `x [batch, time, width]` over time, causally or with the token in the middle.

        Returns:
            The output, and what a causal call for the next tokens takes as `past`.
        """
        y = F.glu(self.inner(x), -1)
        weights = self.dropout(self.taps(y).unflatten(-1, (self.heads, self.kernel)).softmax(-1)).transpose(1, 2)
        y = y if real is None else y.masked_fill(~real[..., None], 0)
        seen = y if past is None else torch.cat([past, y], 1)
        before, after = (self.kernel - 1, 0) if causal else (self.kernel // 2, self.kernel // 2)
        padded = F.pad(seen, (0, 0, before - (seen.shape[1] - y.shape[1]), after))
        mixed = (_band(weights) @ padded.unflatten(2, (self.heads, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)
        return self.outer(mixed), seen[:, max(0, seen.shape[1] - self.kernel + 1) :]


def _band(weights: Tensor) -> Tensor:
    """Matrices `[..., time, time + kernel - 1]` with row t of the weights from column t on.

    One product with such a matrix is several times faster than a sum over windows.
    """
    time, kernel = weights.shape[-2:]
    rows = F.pad(weights, (0, time)).flatten(-2)  # a row of a band is one number shorter, so each begins one later
    return rows[..., : time * (time + kernel - 1)].unflatten(-1, (time, time + kernel - 1))


class MultiLinear(nn.Module):
    """Products of a query, a key and a value over all pairs of earlier words, projected.

    `T[i, j, k] = sum_h g_h v_kh ((q_ih + a_h) k_jh + (q_ih + b_h) p_jh)` for `j, k <= i`, else 0, and
    `out_i = sum_jk T[i, j, k] W[j, k]`: a core `g` of `rank` components (softmax of normal numbers at the start), keys
    `p` of positions, `W [length, length, width]`, so that no more than `length` words fit. With several cores `g` is
    their mean: the cores share queries, keys and values, so that they express what one core does and differ from it
    in initial values and training alone. The authors' released code takes a mask and never uses it: a word depends on
    those after it through `k_j`, `v_k` and `W`. Its `g` is a softmax of uninitialized memory.

    >>> block = MultiLinear(width=6, rank=4, length=5, dropout=0.0)
    >>> block(torch.zeros(2, 3, 6)).shape
    torch.Size([2, 3, 6])
    """

    positions: Tensor

    def __init__(self, width: int, rank: int, length: int, dropout: float, cores: int = 1):
        super().__init__()
        self.query, self.key, self.value, self.place = (nn.Linear(width, rank, bias=False) for _ in range(4))
        self.key_bias, self.place_bias = (nn.Parameter(torch.zeros(rank)) for _ in range(2))
        self.core = nn.Parameter(torch.randn(cores, rank).softmax(-1).squeeze(0))  # [rank] if there is one core
        self.out = nn.Parameter(torch.empty(length, length, width))
        self.dropout = nn.Dropout(dropout)
        angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("positions", torch.cat([angles.sin(), angles.cos()], 1)[:, :width], persistent=False)
        for weight in (self.query.weight, self.key.weight, self.value.weight, self.place.weight, self.out):
            nn.init.normal_(weight, 0, 0.02)  # as the authors' code

    def mix(
        self, x: Tensor, past: tuple[Tensor, ...] | None, real: Tensor | None, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Attend to earlier words of a whole piece of text; see `Attention.mix`."""
        if past is not None or not causal:
            raise ValueError("multi-linear attention reads whole pieces of text, from their first word on")
        return self(x), ()

    def forward(self, x: Tensor) -> Tensor:
        """`x [B, T, width]`, T at most `length`."""
        length = x.shape[1]
        if length > len(self.out):
            raise ValueError(f"multi-linear attention over {len(self.out)} words got {length}; raise max_length")
        query, place = self.query(x)[:, :, None], self.place(self.positions[:length])
        seen = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        left = (query + self.key_bias) * self.key(x)[:, None] + (query + self.place_bias) * place
        core = self.core.view(-1, self.core.shape[-1]).mean(0)
        left = (left * core).masked_fill(~seen[None, :, :, None], 0)  # [B, i, j, rank], j <= i
        products = left @ self.value(x)[:, None].transpose(-1, -2)  # [B, i, j, k]
        products = self.dropout(products).masked_fill(~seen[None, :, None], 0)
        return products.flatten(2) @ self.out[:length, :length].flatten(0, 1)
