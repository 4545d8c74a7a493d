"""Warm-up of statistics: a number of steps, or "auto", by their drift."""

from typing import Any

import torch
from torch import Tensor, nn

from normkit.kernels.rule import NEVER
from normkit.norms._options import Warmup
from normkit.norms._stat_norm import StatNorm

FAST, SLOW = 1 / 8, 1 / 32  # shares of the new value in the averages whose difference is the drift
LARGEST_LAG = 0.15  # the warm-up ends below it; 0.03 without any drift, seldom over 0.11
UNSEEN = 1e-4  # variance of a difference of 1 %, which is no drift
NOTICE = 16  # steps from the decision to the end


class WarmupNorm(StatNorm):
    """Norm that uses past statistics after a warm-up by each batch's own.

    Past statistics lag behind while a model changes fast, above all when the learning rate peaks. With `warmup="auto"`
    the norm measures that. Per channel, it averages the log of each batch's mean square over about 8 and about 32
    steps. `lag` is the mean square of their difference, relative to the variance between batches, and smoothed. The
    warm-up ends 16 steps after it falls below 0.15: past statistics are then nearer to the truth than a batch's own,
    unless they reach back much longer than 32 steps, or a few channels fluctuate by far more than the others.

    Buffers with "auto": `averages [3, C]` (fast, slow, variance), `lag`, and the last step `warmup_end`, 0 at first.

    Args:
        warmup: Updates by the batch's own statistics, or "auto".
    """

    exact_grad = False
    pad_grad = "real"

    warmup: Warmup

    def build(self) -> None:
        super().build()
        if self.warmup == "auto":
            self.averages = nn.Buffer(torch.zeros(3, self.dim))
            self.lag = nn.Buffer(torch.zeros(()))
            self.warmup_end = nn.Buffer(torch.zeros((), dtype=torch.long))

    @property
    def floor(self) -> float:
        """Least mean square of which a logarithm is taken."""
        return self.eps or torch.finfo(self.running.dtype).tiny

    def end_of_warmup(self, state: Any) -> int | Tensor:
        """Return the last step of the warm-up, a tensor while the host does not know it."""
        if self.warmup == "auto" and (torch.compiler.is_compiling() or self.known_end(state) == NEVER):
            return torch.where(state.warmup_end > 0, state.warmup_end, NEVER)
        return self.known_end(state)

    def is_later(self, step: Tensor, least: int, state: Any) -> Tensor:
        """Return True after the warm-up and `least` steps."""
        end = self.end_of_warmup(state)
        return step > (max(end, least) if isinstance(end, int) else end.clamp(min=least))

    def known_end(self, state: Any) -> int:
        if isinstance(self.warmup, int):
            return self.warmup
        return self._ended.seen if self._ended.at_least(1, state.warmup_end) else NEVER

    def kernel_warmup(self, state: Any) -> dict[str, Any]:
        """Return the warm-up's fields of `KernelRule`."""
        if isinstance(self.warmup, int):
            return {"warmup": self.warmup}
        return {"warmup": state.warmup_end}

    def drift_state(self, batch: Tensor, step: Tensor, state: Any) -> dict[str, Tensor]:
        """Return the new values of the buffers of "auto", after a batch with these statistics."""
        if isinstance(self.warmup, int) or not (
            self.follows_optimizer or torch.compiler.is_compiling() or self.known_end(state) == NEVER
        ):
            return {}  # what waits for an optimizer is always written: the state may be loaded or reset meanwhile
        level = batch[-1].to(state.running.dtype).clamp(min=self.floor).log()
        first, before = state.lag == 0, state.averages
        fast, slow = torch.where(first, level, before[0]), torch.where(first, level, before[1])
        variance = before[2].lerp((level - slow).square(), SLOW)
        fast, slow = fast.lerp(level, FAST), slow.lerp(level, SLOW)
        share = (fast - slow).square().mean() / (variance.mean() + UNSEEN)
        lag = torch.where(first, 1.0, state.lag).lerp(share, SLOW)
        lasts = state.warmup_end == 0
        return {
            "averages": torch.where(lasts, torch.stack([fast, slow, variance]), before),
            "lag": torch.where(lasts, lag, state.lag),
            "warmup_end": torch.where(lasts & (lag < LARGEST_LAG), step + NOTICE, state.warmup_end),
        }
