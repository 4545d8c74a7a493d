"""Batches of examples, in an order that depends on seed and epoch only, to resume runs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit_papers.data.ragged import Ragged

CHUNK = 50  # batches of examples that are sorted by length together


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

    The examples are shuffled by seed and epoch. With bucketing, chunks of about 50 batches are then sorted by length,
    in alternating direction, and the batches are shuffled again. Without, a batch is a random sample.

    Args:
        sizes: Lengths of the examples.
        tokens: Largest sum of lengths in a batch, without padding; a batch has at least one example.
        bucketing: Make batches of similar lengths, with little padding.
        by: Sort by this instead of `sizes`. For pairs, `(source length, target length)` leaves less padding than their
            sum (5 % against 10 % on cmudict).
        seed: Seed of the run.
        epoch: Number of the epoch.

    Raises:
        ValueError: If there are no examples, or `tokens` is below 1.

    >>> [batch.tolist() for batch in batches_of([3, 3, 5], tokens=6, bucketing=True, seed=0)]
    [[2], [0, 1]]
    """
    sizes = np.asarray(sizes)
    if not len(sizes):
        raise ValueError("there are no examples to make batches of")
    if tokens < 1:
        raise ValueError(f"a batch must hold at least 1 token; got {tokens}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(sizes), generator=generator).numpy()
    if bucketing:
        keys = np.asarray(sizes if by is None else by).reshape(len(sizes), -1)
        run = max(1, round(CHUNK * tokens * len(sizes) / max(int(sizes.sum()), 1)))
        chunks = [order[at : at + run] for at in range(0, len(order), run)]
        order = np.concatenate([_sorted(chunk, keys[chunk] * (-1) ** n) for n, chunk in enumerate(chunks)])
    ends, batches, start = np.cumsum(sizes[order]), [], 0
    while start < len(order):
        full = tokens + (int(ends[start - 1]) if start else 0)
        end = max(start + 1, int(np.searchsorted(ends, full, side="right")))
        batches.append(order[start:end])
        start = end
    if bucketing:
        batches = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
    return batches


GRID = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def rounded(length: int) -> int:
    """Round a length up to one of `GRID`; longer ones are unchanged.

    >>> rounded(9), rounded(64), rounded(2000)
    (12, 64, 2000)
    """
    return next((each for each in GRID if each >= length), length)


def static_batches(longest: np.ndarray, tokens: int, *, seed: int = 0, epoch: int = 0) -> list[np.ndarray]:
    """Return the examples of each batch of an epoch, such that batches have few shapes.

    A batch of length L, both sides padded to it, has `tokens // 2L` examples. Every example occurs once; the last batch
    of each length is filled up with examples that occur again.

    Args:
        longest: Length of the longer side of each example.
        tokens: Tokens of a batch, with padding.
        seed: Seed of the run.
        epoch: Number of the epoch.

    >>> sorted(sorted(batch.tolist()) for batch in static_batches(np.array([5, 6, 7, 11]), tokens=48))
    [[0, 1, 2], [3, 3]]
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(longest), generator=generator).numpy()
    lengths = np.array([rounded(int(size)) for size in np.arange(longest.max() + 1)])[longest[order]]
    batches = []
    for length in np.unique(lengths):
        items = order[lengths == length]
        rows = max(1, tokens // (2 * int(length)))
        items = np.resize(items, -(-len(items) // rows) * rows)  # repeats from the beginning
        batches += list(items.reshape(-1, rows))
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def _sorted(items: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Sort items by their keys `[n, columns]`, the first column first; the sort is stable."""
    return items[np.lexsort(keys.T[::-1])]


def endless(
    epoch: Callable[[int], Sequence[Any]], collate: Callable[[Any], Any], start: int = 0, stride: int = 1
) -> Iterator[Any]:
    """Yield batches without end: number `start`, `start + stride`, ....

    Args:
        epoch: Returns the examples of each batch of the n-th epoch.
        collate: Makes a batch of its examples.
        start: Number of the first batch.
        stride: Distance to the next one; those between are not collated.

    >>> stream = endless(lambda epoch: [[2 * epoch], [2 * epoch + 1]], tuple, start=3)
    >>> next(stream), next(stream)
    ((3,), (4,))
    """
    at = start
    for number in itertools.count():
        batches = epoch(number)
        yield from map(collate, batches[at::stride])
        at = at - len(batches) if at >= len(batches) else (at - len(batches)) % stride


def pad(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Pad sequences to one tensor `[batch, time]`.

    >>> pad([[5, 6], [7]]).tolist()
    [[5, 6], [7, 0]]
    """
    return Ragged.of(sequences).padded(range(len(sequences)))
