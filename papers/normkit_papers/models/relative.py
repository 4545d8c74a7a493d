"""Attention of Transformer-XL (Dai et al. 2019): relative positions and memory."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RelativeAttention(nn.Module):
    """Causal attention by content and distance, also to the words before a segment.

    The score of word i for word j is `((q_i + a) k_j + (q_i + b) W r_(i-j)) / sqrt(d)` (section 3.3), with sines and
    cosines `r` of the distance, and `a`, `b` for each head. No word attends to later ones.

    Attributes:
        memory: Number of words that the next segment remembers, in training and at inference.

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
