"""Pairs of sequences as numbers, and the batches made of them."""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F

from normkit_papers.data.batches import Batch, Ragged, batches_of
from normkit_papers.data.vocab import BOS, PAD


class PairTable:
    """Sources and targets with their ends, in memory or in mapped files.

    >>> table = PairTable.of([([4, 5, 2], [6, 2]), ([4, 2], [7, 2])])
    >>> [tensor.tolist() for tensor in table.batch([1]).tensors]
    [[[4, 2]], [[1, 7]], [[7, 2]]]
    """

    def __init__(self, source: Ragged, target: Ragged, rows: np.ndarray | None = None):
        self.source, self.target = source, target
        self.rows = np.arange(len(source), dtype=np.int32) if rows is None else rows
        self.both = np.stack([source.sizes[self.rows], target.sizes[self.rows]], 1)
        self.sizes = self.both.sum(1, dtype=np.int32)

    @classmethod
    def of(cls, pairs: Sequence[tuple[list[int], list[int]]]) -> "PairTable":
        """Make a table of lists of numbers."""
        return cls(Ragged.of([pair[0] for pair in pairs]), Ragged.of([pair[1] for pair in pairs]))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, item: int) -> tuple[list[int], list[int]]:
        row = self.rows[item]
        return self.source[row], self.target[row]

    def take(self, items: Sequence[int] | np.ndarray) -> "PairTable":
        """Return a table of some pairs."""
        return PairTable(self.source, self.target, self.rows[np.asarray(items)])

    def batch(self, items: Sequence[int] | np.ndarray) -> Batch:
        """Return source, decoder input and target."""
        rows = self.rows[np.asarray(items)]
        source, target = self.source.padded(rows), self.target.padded(rows)
        given = F.pad(target[:, :-1], (1, 0), value=BOS).masked_fill_(target == PAD, PAD)
        return Batch((source, given, target), len(items), int(self.target.sizes[rows].sum()))

    def sorted_items(self, together: int) -> list[list[int]]:
        """Return all items by length of the source, in lists of `together`."""
        order = np.argsort(self.both[:, 0], kind="stable").tolist()
        return [order[at : at + together] for at in range(0, len(order), together)]

    def batches(self, tokens: int) -> list[Batch]:
        """Return all pairs once, in batches of similar length and of at most `tokens` symbols."""
        return [self.batch(items) for items in batches_of(self.sizes, tokens, bucketing=True, by=self.both)]
