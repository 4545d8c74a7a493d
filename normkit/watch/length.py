"""Batch lengths: their trace in norms' statistics, and those of sources and targets."""

import math
import statistics

import torch
from torch import Tensor

from normkit.watch.recording import Recording

FORGET = 0.98  # weight of the past: about the last 50 samples count
LEAST = 3  # samples from which on there is a share
LEAST_BATCHES = 10  # sampled batches from which on lengths are compared


class LengthShare:
    """Regression of a norm's batch statistics on the batch length, over the samples of a run.

    It compares each sample with the one before, so that the drift of training cancels. The share is adjusted for
    chance, 0 on average if statistics and lengths are independent, and is 0 where all batches have one length.

    >>> share = LengthShare()
    >>> for number in range(50):
    ...     length, other = torch.tensor([float(number % 5)]), torch.tensor([float(number % 2)])
    ...     found = share.add(length, length * 3, other)
    >>> found.round(decimals=1).tolist()
    [1.0, 0.0]
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None  # [1 + C + ...]: the length, then all statistics
        self.sums = torch.zeros(2, 1)  # of (change of length) * change, and of change ** 2
        self.count = 0.0

    def add(self, length: Tensor, *statistics: Tensor) -> Tensor | None:
        """Add a sample; return the share of each of `statistics`, None if there are too few."""
        new = torch.cat([length.reshape(1).to(statistics[0]), *statistics])
        if self.last is None:
            self.last, self.sums = new, new.new_zeros(2, len(new))
            return None
        change = new - self.last
        finite = torch.isfinite(change).all()
        added = torch.stack([change[0] * change, change.square()])
        self.sums = FORGET * self.sums + torch.where(finite, added, 0)
        self.last = torch.where(torch.isfinite(new).all(), new, self.last)
        self.count = FORGET * self.count + 1
        if self.count < LEAST - 1:
            return None
        tiny = torch.finfo(new.dtype).tiny
        products, squares = (part[1:].split([len(each) for each in statistics]) for part in self.sums)
        explained = torch.stack([part.square().sum() for part in products]) / self.sums[0, 0].clamp(min=tiny)
        share = explained / torch.stack([part.sum() for part in squares]).clamp(min=tiny)
        return (1 - (1 - share) * self.count / (self.count - 1)).clamp(min=0)


def batch_lengths(mask: Tensor | None, shape: torch.Size, like: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the real tokens per sequence along `axis` of `shape`.

    >>> [each.item() for each in batch_lengths(torch.tensor([[1, 1, 1], [1, 0, 0]]), torch.Size([2, 3]), torch.ones(1))]
    [2.0, 1.0]
    """
    axis = min(axis, max(len(shape) - 1, 0))
    if mask is None:
        return like.new_full((), math.prod([*shape[:axis], *shape[axis + 1 :]])), like.new_zeros(())
    lengths = torch.atleast_1d(mask).movedim(axis, 0).reshape(*shape[axis : axis + 1], -1).sum(-1).to(like)
    return lengths.mean(), lengths.std(correction=0)


def target_share(recording: Recording) -> float:
    """Return the share of target lengths, given source lengths, that is between batches.

    It is a share of variance. The first norm reads sources, the last one targets. What a line through the batches' mean
    lengths leaves of the targets' is compared with the spread in a batch. Shuffled batches have a share near 0.

    Returns:
        The share; 0 if all sequences have one length; nan if lengths were not recorded in ten batches, or the first and
        last norm read the same sequences.
    """
    lengths, spreads = recording.of("length"), recording.of("length_spread")
    if not lengths or list(lengths)[-1] not in spreads:
        return math.nan
    first, *_, last = (*lengths, *lengths)
    points = [dict(series.points()) for series in (lengths[first], lengths[last], spreads[last])]
    steps = [step for step in points[0] if all(step in each for each in points)]
    if len(steps) < LEAST_BATCHES:
        return math.nan
    x, y, spread = ([each[step] for step in steps] for each in points)
    if min(x) == max(x) and min(y) == max(y) and not any(spread):
        return 0.0
    if x == y or min(x) == max(x) or min(y) == max(y):
        return math.nan
    between = statistics.pvariance(y) * (1 - statistics.correlation(x, y) ** 2)
    total = between + statistics.fmean(each * each for each in spread)
    return between / total if total else 0.0
