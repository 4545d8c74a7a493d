"""Sequences of different lengths, and batches in an order that depends on seed and epoch only."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from normkit_papers.data.vocab import PAD

CHUNK = 50  # batches of examples that are sorted by length together


class Batch(NamedTuple):
    """Tensors of a batch, and its size."""

    tensors: tuple[Any, ...]  # for a detector, lists of images and of targets
    words: int  # or images
    tokens: int  # the number of terms in the mean loss
    fresh: bool = False  # the first batch of a text: it continues no batch before it


class Ragged:
    """Sequences of numbers in one array, in memory or mapped from a file.

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
        return cls(np.fromiter(itertools.chain.from_iterable(sequences), np.int32, ends[-1]), ends)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, item: int) -> list[int]:
        return self.flat[self.offsets[item] : self.offsets[item + 1]].tolist()

    def padded(self, items: Sequence[int] | np.ndarray) -> Tensor:
        """Return items as one padded tensor `[len(items), longest]`."""
        starts, sizes = self.offsets[items], self.sizes[items]
        columns = np.arange(sizes.max())
        there = columns < sizes[:, None]
        at = np.where(there, starts[:, None] + columns, 0)
        return torch.from_numpy(np.where(there, self.flat[at], PAD).astype(np.int64))


def batches_of(
    sizes: Sequence[int] | np.ndarray,
    tokens: int,
    *,
    bucketing: bool,
    by: Sequence[Any] | np.ndarray | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> list[np.ndarray]:
    """Return the examples of each batch of an epoch, every example once.

    The examples are shuffled by seed and epoch. With bucketing, chunks of about 50 batches are then sorted by `by`, or
    by length, in alternating direction, and the batches are shuffled again. Without, a batch is a random sample. It
    has at most `tokens` of length without padding, or one example. For pairs, sorting by `(source length, target
    length)` leaves less padding than by their sum (5 % against 10 % on cmudict).

    Raises:
        ValueError: If there are no examples.

    >>> [batch.tolist() for batch in batches_of([3, 3, 5], tokens=6, bucketing=True, seed=0)]
    [[2], [0, 1]]
    """
    sizes = np.asarray(sizes)
    if not len(sizes):
        raise ValueError("there are no examples to make batches of")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(sizes), generator=generator).numpy()
    if bucketing:
        keys = np.asarray(sizes if by is None else by).reshape(len(sizes), -1)
        run = max(1, round(CHUNK * tokens * len(sizes) / max(int(sizes.sum()), 1)))
        chunks = [order[at : at + run] for at in range(0, len(order), run)]
        order = np.concatenate([chunk[np.lexsort(keys[chunk].T[::-1] * (-1) ** n)] for n, chunk in enumerate(chunks)])
    ends, batches, start = np.cumsum(sizes[order]), [], 0
    while start < len(order):
        full = tokens + (int(ends[start - 1]) if start else 0)
        end = max(start + 1, int(np.searchsorted(ends, full, side="right")))
        batches.append(order[start:end])
        start = end
    if bucketing:
        batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
    return batches


def endless(
    epoch: Callable[[int], Sequence[Any]], collate: Callable[[Any], Any], start: int = 0, stride: int = 1
) -> Iterator[Any]:
    """Yield batches without end: number `start`, `start + stride`, ....

    `epoch` returns the examples of each batch of the n-th epoch, `collate` makes a batch of its examples.

    >>> stream = endless(lambda epoch: [[2 * epoch], [2 * epoch + 1]], tuple, start=3)
    >>> next(stream), next(stream)
    ((3,), (4,))
    """
    at = start
    for number in itertools.count():
        batches = epoch(number)
        yield from map(collate, batches[at::stride])
        at = at - len(batches) if at >= len(batches) else (at - len(batches)) % stride


def load(dataset: Dataset, workers: int, **how: Any) -> Iterator[Any]:
    """Yield what a DataLoader with `workers` processes reads.

    Raises:
        ValueError: If a worker raises one, with its message alone.
    """
    # without a generator of its own, the loader would draw from that of dropout
    try:
        yield from DataLoader(dataset, num_workers=workers, generator=torch.Generator(), **how)
    except ValueError as error:
        _, is_of_worker, trace = str(error).partition("Original Traceback")
        raise ValueError(trace.strip().splitlines()[-1].partition(": ")[2]) if is_of_worker else error from None


def spread(length: int, count: int) -> list[int]:
    """Return `count` evenly spaced items of `length`, or all if there are fewer.

    >>> spread(10, 3)
    [0, 3, 6]
    """
    return list(range(length)) if length <= count else [number * length // count for number in range(count)]


def pad(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Pad sequences to one tensor `[batch, time]`.

    >>> pad([[5, 6], [7]]).tolist()
    [[5, 6], [7, 0]]
    """
    return Ragged.of(sequences).padded(range(len(sequences)))
