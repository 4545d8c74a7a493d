"""Pairs of sequences, from which a batch is cut out."""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F

from normkit.lab.data.batches import batches_of, rounded
from normkit.lab.data.ragged import Ragged
from normkit.lab.data.vocab import BOS, PAD
from normkit.lab.train.task import Batch


class Table:
    """Sources and targets, as they lie in memory or in mapped files; `rows` are those that the table has, in order.

    >>> table = Table.of([([4, 5, 2], [6, 2]), ([4, 2], [7, 2])])
    >>> [tensor.tolist() for tensor in table.batch([1]).tensors]
    [[[4, 2]], [[1, 7]], [[7, 2]]]
    """

    def __init__(self, source: Ragged, target: Ragged, rows: np.ndarray | None = None):
        self.source, self.target = source, target
        self.rows = np.arange(len(source), dtype=np.int32) if rows is None else rows
        self.both = np.stack([source.sizes[self.rows], target.sizes[self.rows]], 1)
        self.sizes = self.both.sum(1, dtype=np.int32)

    @classmethod
    def of(cls, pairs: Sequence[tuple[list[int], list[int]]]) -> "Table":
        """From lists of numbers."""
        return cls(Ragged.of([pair[0] for pair in pairs]), Ragged.of([pair[1] for pair in pairs]))

    def __len__(self) -> int:
        return len(self.sizes)

    def take(self, items: Sequence[int] | np.ndarray) -> "Table":
        """A table of some pairs."""
        return Table(self.source, self.target, self.rows[np.asarray(items)])

    def batch(self, items: Sequence[int] | np.ndarray, static: bool = False) -> Batch:
        """Source, what the decoder is given, and what it should say; `static` rounds lengths up to one of few."""
        rows = self.rows[np.asarray(items)]
        length = rounded(int(self.both[np.asarray(items)].max())) if static else 0
        source, target = self.source.padded(rows, length), self.target.padded(rows, length)
        given = F.pad(target[:, :-1], (1, 0), value=BOS).masked_fill_(target == PAD, PAD)
        return Batch((source, given, target), len(items), int(self.target.sizes[rows].sum()))

    def sorted_items(self, together: int) -> list[list[int]]:
        """All items, shortest source first, so many at a time."""
        order = np.argsort(self.both[:, 0], kind="stable").tolist()
        return [order[at : at + together] for at in range(0, len(order), together)]

    def batches(self, tokens: int) -> list[Batch]:
        """All pairs once, in batches of about one length, of at most so many symbols: as large as in training."""
        return [self.batch(items) for items in batches_of(self.sizes, tokens, bucketing=True, by=self.both)]


def spread(length: int, count: int) -> list[int]:
    """`count` of so many items, at even distances; all where there are fewer.

    >>> spread(10, 3)
    [0, 3, 6]
    """
    return list(range(length)) if length <= count else [number * length // count for number in range(count)]
