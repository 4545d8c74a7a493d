"""Share of the variance between batches that the length of a batch explains."""

import torch
from torch import Tensor

FORGET = 0.98  # weight of the past: about the last 50 samples count
LEAST = 3  # samples from which on there is a share


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
        self.last = torch.where(finite, new, self.last)
        self.count = FORGET * self.count + 1
        if self.count < LEAST - 1:
            return None
        tiny = torch.finfo(new.dtype).tiny
        products, squares = (part[1:].split([len(each) for each in statistics]) for part in self.sums)
        explained = torch.stack([part.square().sum() for part in products]) / self.sums[0, 0].clamp(min=tiny)
        share = explained / torch.stack([part.sum() for part in squares]).clamp(min=tiny)
        return (1 - (1 - share) * self.count / (self.count - 1)).clamp(min=0)


def batch_length(mask: Tensor | None, shape: torch.Size, like: Tensor) -> Tensor:
    """Return real tokens per sequence of `[batch, time, ...]`; 1 without time."""
    count = like.new_full((), shape.numel()) if mask is None else mask.sum().to(like)
    return count / max(shape[0], 1)
