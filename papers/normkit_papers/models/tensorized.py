"""Causal multi-linear attention of the tensorized Transformer (Ma et al. 2019)."""

import torch
from torch import Tensor, nn


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
