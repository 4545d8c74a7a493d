"""Adaptive embeddings, tied to the output: rare words get narrow vectors.

Baevski & Auli 2019; Grave et al. 2017.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

NARROWER = 4  # each group's vectors are so many times narrower than those of the group before


class Adaptive(nn.Module):
    """Word vectors in groups by frequency, and the output distribution of the same vectors.

    Words must be numbered by frequency. `cuts` are the numbers at which a group ends: words below `cuts[0]` have
    vectors of `width` channels, those of the next group `width / 4`, projected to `width`, and so on. `p(word)` is
    `p(group) p(word | group)`; the scores of the first group and of the groups themselves share a softmax.

    >>> layer = Adaptive(words=10, width=8, cuts=(4, 7))
    >>> layer.embed(torch.tensor([[3, 9]])).shape, layer(torch.zeros(1, 2, 8)).exp().sum(-1).round(decimals=4).tolist()
    (torch.Size([1, 2, 8]), [[1.0, 1.0]])
    """

    tables: Any
    maps: Any

    def __init__(self, words: int, width: int, cuts: Sequence[int]):
        super().__init__()
        self.edges = [0, *cuts, words]
        if self.edges != sorted(set(self.edges)):
            raise ValueError(f"adaptive needs rising numbers above 0 and below {words} words; got {tuple(cuts)}")
        widths = [max(1, width // NARROWER**group) for group in range(len(cuts) + 1)]
        self.tables = nn.ModuleList(
            nn.Embedding(end - start, w) for (start, end), w in zip(pairwise(self.edges), widths, strict=True)
        )
        self.maps = nn.ModuleList(nn.Linear(w, width, bias=False) for w in widths[1:])
        self.groups = nn.Linear(width, len(cuts))
        for table, w in zip(self.tables, widths, strict=True):
            nn.init.normal_(table.weight, 0, w**-0.5)
        for linear in self.maps:
            nn.init.normal_(linear.weight, 0, linear.out_features**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return vectors `[..., width]` of words."""
        found = self.tables[0](tokens.clamp(max=self.edges[1] - 1))
        for group, linear in enumerate(self.maps, 1):
            start, end = self.edges[group], self.edges[group + 1]
            here = (tokens >= start) & (tokens < end)
            vectors = linear(self.tables[group]((tokens - start).clamp(0, end - start - 1)))
            found = torch.where(here[..., None], vectors, found)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return log probabilities `[..., words]` of all words."""
        head = self._head(x)
        first = self.edges[1]
        tails = [head[..., first + g - 1, None] + self._tail(x, g) for g in range(1, len(self.tables))]
        return torch.cat([head[..., :first], *tails], -1)

    def nll(self, x: Tensor, target: Tensor) -> Tensor:
        """Mean of `-log p(target)` of `x [n, width]`; only groups of the targets are computed."""
        first, head = self.edges[1], self._head(x)
        group = torch.bucketize(target, torch.tensor(self.edges[1:-1], device=target.device), right=True)
        at = torch.where(group == 0, target, first + group - 1)
        total = head.gather(-1, at[:, None]).sum()
        for number in range(1, len(self.tables)):
            here = group == number
            tail = self._tail(x[here], number)
            total = total + tail.gather(-1, (target[here] - self.edges[number])[:, None]).sum()
        return -total / len(target)

    def _head(self, x: Tensor) -> Tensor:
        return torch.cat([x @ self.tables[0].weight.T, self.groups(x)], -1).log_softmax(-1)

    def _tail(self, x: Tensor, group: int) -> Tensor:
        linear, table = self.maps[group - 1], self.tables[group]
        return (x @ linear.weight @ table.weight.T).log_softmax(-1)
