"""Learning rate over time by the papers' rules (Transformers without Tears, section 3)."""

import math
from functools import partial

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from normkit_papers.train.config import Run


def learning_rate(run: Run, n: int, peak: float) -> float:
    """Return the learning rate of step n = 1, 2, ....

    A linear warm-up reaches the peak at step `run.warmup`, from `run.warmup_start` if that is given. Then

    - "cosine": a half cosine, which would reach `floor_lr` after the last step;
    - "steps": constant, times `decay` after each milestone;
    - "inverse_sqrt": `peak * sqrt(warmup / n)` (Eq. 7). The paper's constant lambda is a peak of
      `lambda / sqrt(d * warmup)`. Fairseq's own n counts the updates before this one and is one step behind;
    - "constant" and "validation_decay": constant.

    >>> from normkit_papers.train.config import DigitsRun
    >>> run = DigitsRun(name="x", data="digits", steps=20, schedule="inverse_sqrt", warmup=4)
    >>> [learning_rate(run, n, 1.0) for n in (1, 4, 16)]
    [0.25, 1.0, 0.5]
    """
    start = run.warmup_start
    if run.schedule in ("cosine", "steps"):
        warmup = min(run.warmup, run.steps - 1)
        if n <= warmup:
            first = start or peak / warmup
            return first + (peak - first) * (n - 1) / max(warmup - 1, 1)
        if run.schedule == "steps":
            return peak * 0.1 ** sum(n > step for step in run.milestones)
        return (
            run.floor_lr + (peak - run.floor_lr) * (1 + math.cos(math.pi * (n - 1 - warmup) / (run.steps - warmup))) / 2
        )
    if run.schedule == "inverse_sqrt":
        return start + (peak - start) * n / run.warmup if n < run.warmup else peak * math.sqrt(run.warmup / n)
    return peak * min(1.0, n / run.warmup) if run.warmup else peak


class Schedule(LambdaLR):
    """`learning_rate` by group; with "validation_decay", lower when validation stagnates.

    It stagnates after `PATIENCE` validations without a new best score; the count then restarts. (Tears' released code
    compares with the last validations alone, and crashed at its first one.)
    """

    FACTOR, PATIENCE = 0.8, 3

    def __init__(self, optimizer: Optimizer, run: Run):
        self.decays = self.waited = 0
        self.best = -math.inf
        self.adapts = run.schedule == "validation_decay"
        peaks = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, [partial(self._factor, run, peak) for peak in peaks])

    def _factor(self, run: Run, peak: float, steps_before: int) -> float:
        return learning_rate(run, steps_before + 1, peak) / peak * self.FACTOR**self.decays

    def validated(self, score: float) -> None:
        """Record a validation score, the higher the better."""
        if not self.adapts:
            return
        self.waited = 0 if score > self.best else self.waited + 1
        self.best = max(self.best, score)
        if self.waited >= self.PATIENCE:
            self.decays, self.waited = self.decays + 1, 0
            for group in self.optimizer.param_groups:
                group["lr"] *= self.FACTOR
