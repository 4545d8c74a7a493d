"""Batch Renormalization (Ioffe 2017, arXiv:1702.03275)."""

from typing import Any

import torch
from torch import Tensor

from normkit.kernels.rule import Stat
from normkit.norms._options import Bound, OldShare, Positive, Steps
from normkit.norms._stat_norm import StatNorm


class BatchRenorm(StatNorm):
    """BatchNorm corrected toward its running statistics.

    `y = weight * (r * (x - mu_B) / sigma_B + d) + bias` with `r = clip(sigma_B / sigma, 1/r_max, r_max)` and
    `d = clip((mu_B - mu) / sigma, -d_max, d_max)`. These use the running values from before the step and are constants
    to the gradient; `sigma = sqrt(var + eps)`. During the warm-up r = 1 and d = 0; then the bounds grow linearly.
    Standard deviations are averaged, not variances; `running[1]` holds `sigma^2 - eps`, so inference reads `running`
    as for every other norm. The defaults are the paper's.

    Args:
        alpha: Share of the old running statistics per step.
        r_max: Final bound of r.
        d_max: Final bound of d.
        warmup: Training forwards with r = 1 and d = 0.
        r_until: Training forward in which the bound of r reaches `r_max`.
        d_until: Training forward in which the bound of d reaches `d_max`.

    >>> import torch
    >>> BatchRenorm(1, eps=0.0)(torch.tensor([[1.0], [3.0]])).tolist()
    [[-1.0], [1.0]]
    """

    center = True
    exact_grad = False  # r and d are held constant

    alpha: OldShare = 0.99
    r_max: Bound = 3.0
    d_max: Positive = 5.0
    warmup: Steps = 5000
    r_until: Steps = 40_000
    d_until: Steps = 25_000

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor, state: Any) -> Stat:  # noqa: D102
        r_max = 1 + (self.r_max - 1) * self._progress(step, self.r_until)
        d_max = self.d_max * self._progress(step, self.d_until)
        mean, sigma = state.running[0], torch.sqrt(state.running[1] + self.eps)
        batch_sigma = torch.sqrt(batch[1] + self.eps)
        r = torch.maximum(torch.minimum(batch_sigma / sigma, r_max), 1 / r_max)
        d = torch.maximum(torch.minimum((batch[0] - mean) / sigma, d_max), -d_max)
        new_sigma = sigma.lerp(batch_sigma.to(sigma.dtype), 1 - self.alpha)
        running = torch.stack([mean.lerp(batch[0].to(mean.dtype), 1 - self.alpha), new_sigma.square() - self.eps])
        return Stat(batch, {"running": running}, output_scale=r, output_shift=d)

    def _progress(self, step: Tensor, until: int) -> Tensor:
        """Return 0 during the warm-up, then a linear rise to 1 at `until`."""
        return ((step - self.warmup).to(self.running.dtype) / max(until - self.warmup, 1)).clamp(0, 1)
