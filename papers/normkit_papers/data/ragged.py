"""Many sequences of different lengths in one flat array, in memory or mapped from a file."""

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from normkit_papers.data.vocab import PAD


class Ragged:
    """Sequences of numbers, concatenated in one array.

    The i-th sequence is `flat[offsets[i]:offsets[i + 1]]`.

    >>> items = Ragged.of([[5, 6], [7]])
    >>> len(items), items[0], items.padded([0, 1]).tolist()
    (2, [5, 6], [[5, 6], [7, 0]])
    """

    def __init__(self, flat: np.ndarray, offsets: np.ndarray):
        self.flat, self.offsets = flat, offsets
        self.sizes = np.diff(np.asarray(offsets)).astype(np.int32)

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "Ragged":
        """Make one array of lists of numbers."""
        ends = np.cumsum([0, *map(len, sequences)])
        return cls(np.fromiter(chain.from_iterable(sequences), np.int32, ends[-1]), ends)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, item: int) -> list[int]:
        return self.flat[self.offsets[item] : self.offsets[item + 1]].tolist()

    def padded(self, items: Sequence[int] | np.ndarray, length: int = 0) -> Tensor:
        """Return items as one padded tensor `[len(items), longest]`, at least `length` long."""
        starts, sizes = self.offsets[items], self.sizes[items]
        columns = np.arange(max(sizes.max(), length))
        there = columns < sizes[:, None]
        at = np.where(there, starts[:, None] + columns, 0)
        return torch.from_numpy(np.where(there, self.flat[at], PAD).astype(np.int64))
