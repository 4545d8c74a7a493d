"""Batch Renormalization (Ioffe 2017, arXiv:1702.03275)."""

import torch
from torch import Tensor

from normkit.kernels.kernel_rule import KernelRule
from normkit.norms._base import Stat, StatNorm
from normkit.norms._require import require, require_count, require_fraction, require_positive


class BatchRenorm(StatNorm):
    """BatchNorm corrected towards its running statistics: `y = weight * (r * (x - mu_B) / sigma_B + d) + bias`.

    `r = clip(sigma_B / sigma, 1/r_max, r_max)` and `d = clip((mu_B - mu) / sigma, -d_max, d_max)` use the running
    values from before the step and are constants to the gradient; `sigma = sqrt(var + eps)`. For `warmup` steps
    r = 1 and d = 0; then the bounds grow linearly to `r_max` at step `r_until` and `d_max` at `d_until`, the paper's
    schedule. A standard deviation is averaged, not a variance; `running[1]` holds `sigma^2 - eps`, so inference reads
    like every other norm's.

    >>> import torch
    >>> BatchRenorm(1, eps=0.0)(torch.tensor([[1.0], [3.0]])).tolist()
    [[-1.0], [1.0]]
    """

    center = True
    exact_grad = False  # r and d are held constant
    pad_grad = "exact"

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        sync: bool = False,
        steps_per_update: int = 1,
        alpha: float = 0.99,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup: int = 5000,
        r_until: int = 40_000,
        d_until: int = 25_000,
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias, sync=sync, steps_per_update=steps_per_update)
        require_fraction("alpha", alpha)
        require_positive("r_max", r_max)
        require(r_max >= 1, "r_max", r_max, "a number >= 1")
        require_positive("d_max", d_max)
        for name, value in (("warmup", warmup), ("r_until", r_until), ("d_until", d_until)):
            require_count(name, value, 0)
        self.alpha, self.r_max, self.d_max = alpha, r_max, d_max
        self.warmup, self.r_until, self.d_until = warmup, r_until, d_until

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:  # noqa: D102
        r_max = 1 + (self.r_max - 1) * self._grown(step, self.r_until)
        d_max = self.d_max * self._grown(step, self.d_until)
        mean, sigma = self.running[0], torch.sqrt(self.running[1] + self.eps)
        batch_sigma = torch.sqrt(batch[1] + self.eps)
        r = torch.maximum(torch.minimum(batch_sigma / sigma, r_max), 1 / r_max)
        d = torch.maximum(torch.minimum((batch[0] - mean) / sigma, d_max), -d_max)
        new_sigma = sigma.lerp(batch_sigma.to(sigma.dtype), 1 - self.alpha)
        running = torch.stack([mean.lerp(batch[0].to(mean.dtype), 1 - self.alpha), new_sigma.square() - self.eps])
        return Stat(batch, {"running": running}, output_scale=r, output_shift=d)

    def _grown(self, step: Tensor, until: int) -> Tensor:
        """0 up to the warm-up's end, then linearly to 1 at `until`."""
        span = max(until - self.warmup, 1)
        return ((step - self.warmup).to(self.running.dtype) / span).clamp(0, 1)

    def kernel_rule(self) -> KernelRule:  # noqa: D102
        until, bounds = (self.r_until, self.d_until), (self.r_max, self.d_max)
        return KernelRule("renorm", rate=1 - self.alpha, warmup=self.warmup, until=until, bounds=bounds)
