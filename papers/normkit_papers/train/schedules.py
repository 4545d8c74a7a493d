"""Learning rate schedules as PyTorch schedulers.

Rules of the papers (Transformers without Tears, section 3).
"""

import math
from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, MultiStepLR, SequentialLR

from normkit_papers.train.settings import Schedule


class InverseSqrt(LRScheduler):
    """Linear warm-up to the optimizer's lr at step `warmup`, then `n ** -0.5` (Eq. 7).

    `lr(n) = peak * sqrt(warmup) * min(n ** -0.5, n * warmup ** -1.5)`. The paper's constant lambda is a peak of
    `lambda / sqrt(d * warmup)`. With `start`, the warm-up is `start + n (peak - start) / warmup` as in fairseq, whose
    own n counts the updates before this one and is one step behind.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> schedule = InverseSqrt(optimizer, warmup=4)
    >>> [round(schedule.rate(n), 3) for n in (1, 4, 16)]
    [0.25, 1.0, 0.5]
    """

    def __init__(self, optimizer: Optimizer, warmup: int, start: float = 0.0):
        if warmup < 1:
            raise ValueError(f"warmup must be at least 1 step; got {warmup}")
        self.warmup, self.start = warmup, start
        super().__init__(optimizer)

    def rate(self, n: int, peak: Any = 1.0) -> Any:
        """Return the learning rate of step n = 1, 2, ...."""
        if n < self.warmup:
            return self.start + (peak - self.start) * n / self.warmup
        return peak * math.sqrt(self.warmup / n)

    def get_lr(self) -> list:
        """Return the learning rates of the next step."""
        return [self.rate(self.last_epoch + 1, peak) for peak in self.base_lrs]


class Constant(LRScheduler):
    """Linear warm-up over `warmup` steps, then the optimizer's lr."""

    def __init__(self, optimizer: Optimizer, warmup: int = 0):
        if warmup < 0:
            raise ValueError(f"warmup must be at least 0 steps; got {warmup}")
        self.warmup = warmup
        super().__init__(optimizer)

    def get_lr(self) -> list:
        """Return the learning rates of the next step."""
        share = min(1.0, (self.last_epoch + 1) / self.warmup) if self.warmup else 1.0
        return [peak * share for peak in self.base_lrs]


class ValidationDecay(Constant):
    """Constant after the warm-up, times `factor` whenever the validation score stagnates.

    It stagnates after `patience` validations without a new best score, the highest one; the count then restarts. Call
    `validated(score)` after each validation. (Tears' released code compares with the last validations alone, and
    crashed at its first one.) The paper ends training below a rate of 1e-6, the code at 5e-5.
    """

    def __init__(self, optimizer: Optimizer, warmup: int = 0, factor: float = 0.8, patience: int = 3):
        if not 0 < factor < 1 or patience < 1:
            raise ValueError(f"needs 0 < factor < 1 and patience >= 1; got {factor}, {patience}")
        self.factor, self.patience = factor, patience
        self.decays, self.waited, self.best = 0, 0, -math.inf
        super().__init__(optimizer, warmup)

    def validated(self, score: float) -> bool:
        """Record a validation score; return True if the learning rate falls."""
        self.waited = 0 if score > self.best else self.waited + 1
        self.best = max(self.best, score)
        if stagnates := self.waited >= self.patience:
            self.decays, self.waited = self.decays + 1, 0
            for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
                group["lr"] = rate
        return stagnates

    def get_lr(self) -> list:
        """Return the learning rates of the next step."""
        return [rate * self.factor**self.decays for rate in super().get_lr()]


def make_schedule(optimizer: Optimizer, settings: Schedule, steps: int) -> LRScheduler:
    """Return the schedule of a run's settings over `steps` optimizer steps."""
    warmup, start = min(settings.warmup, steps - 1), settings.warmup_start
    match settings.schedule:
        case "cosine":
            return cosine(optimizer, warmup, steps, settings.floor_lr, start)
        case "steps":
            return steps_down(optimizer, warmup, settings.milestones, settings.decay, start)
        case "inverse_sqrt":
            return InverseSqrt(optimizer, settings.warmup, start)
        case "constant":
            return Constant(optimizer, settings.warmup)
        case "validation_decay":
            return ValidationDecay(optimizer, settings.warmup)


def cosine(optimizer: Optimizer, warmup: int, steps: int, floor: float = 0.0, start: float = 0.0) -> LRScheduler:
    """Return a linear warm-up, then a half cosine down to `floor` at `steps`.

    The first step of the warm-up has the rate `start`, or if that is 0, `1 / warmup` of the peak.
    """
    if not 0 <= warmup < steps:
        raise ValueError(f"warmup must be at least 0 and below steps={steps}; got {warmup}")
    return _warmed(CosineAnnealingLR(optimizer, max(steps - warmup, 1), floor), warmup, start)


def steps_down(
    optimizer: Optimizer, warmup: int, milestones: Sequence[int], factor: float = 0.1, start: float = 0.0
) -> LRScheduler:
    """Return a linear warm-up as in `cosine`, then a constant, times `factor` at milestones.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> schedule, rates = steps_down(optimizer, 2, [3, 5]), []
    >>> for _ in range(6):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 3))
    ...     _ = optimizer.step(), schedule.step()
    >>> rates
    [0.5, 1.0, 1.0, 0.1, 0.1, 0.01]
    """
    if warmup and milestones and milestones[0] <= warmup:
        raise ValueError(f"milestones must come after the warm-up of {warmup} steps; got {tuple(milestones)}")
    return _warmed(MultiStepLR(optimizer, [step - warmup for step in milestones], factor), warmup, start)


def _warmed(after: LRScheduler, warmup: int, start: float) -> LRScheduler:
    if warmup == 0:
        return after
    peak = max(float(lr) for lr in after.base_lrs)
    rising = LinearLR(after.optimizer, start / peak if start else 1 / warmup, 1.0, max(warmup - 1, 1))
    parts: Sequence[LRScheduler] = [rising, after]
    return SequentialLR(after.optimizer, list(parts), [warmup])
