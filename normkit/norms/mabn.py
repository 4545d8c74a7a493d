"""Moving Average Batch Normalization (Yan et al. 2020, arXiv:2001.06838)."""

from typing import Any

import torch
from torch import Tensor, nn

from normkit.kernels.rule import Stat, push
from normkit.norms._options import Bound, OldShare, Steps, Warmup, Window
from normkit.norms._warmup import WarmupNorm


class MABN(WarmupNorm):
    """Quadratic means and gradient means averaged over the last `window` batches.

    Once `step > window` and `step >= warmup`, `v = mean(window of mean(x^2))`, before that the batch's own;
    `z = x / sqrt(v + eps)`, `y = weight * r * z + bias`; the gradient removes the mean of the last `window` values of
    `mean(g * z)`, `g = weight * r * dy`. After `max(renorm_after, warmup)` steps
    `r = clip(sqrt(v + eps) / sqrt(var + eps), 1/r_max, r_max)` with the running var from before the step, constant to
    the gradient. `running <- alpha running + (1 - alpha) v`. The other defaults are those of the released code.

    Args:
        window: Batches per window.
        alpha: Share of the old running statistics per step.
        warmup: Update from which on windows are used; "auto" ends the warm-up by drift (`WarmupNorm`). In the
            released code it is 100.
        renorm_after: Training forwards before r applies.
        r_max: Bound of r.

    >>> import torch
    >>> MABN(1, window=2, eps=0.0)(torch.tensor([[3.0], [-3.0]])).tolist()
    [[1.0], [-1.0]]
    """

    window: Window = 16
    alpha: OldShare = 0.98
    warmup: Warmup = "auto"
    renorm_after: Steps = 1000
    r_max: Bound = 5.0

    def build(self) -> None:  # noqa: D102
        super().build()
        self.window_x = nn.Buffer(torch.zeros(self.window, self.dim))
        self.window_g = nn.Buffer(torch.zeros(self.window, self.dim))

    def _batch_phase(self, step: Tensor, state: Any) -> Tensor:
        return (step <= self.window) | (step < self.end_of_warmup(state))

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor, state: Any) -> Stat:  # noqa: D102
        window = push(state.window_x, step, batch[0])
        value = torch.where(self._batch_phase(step, state), batch, window.mean(0, keepdim=True))
        r = torch.sqrt((value[0] + self.eps) / (state.running[0] + self.eps)).clamp(1 / self.r_max, self.r_max)
        r = torch.where(self.is_later(step, self.renorm_after, state), r, 1.0)
        new = {"window_x": window, "running": self.average(value, state), **self.drift_state(batch, step, state)}
        return Stat(value, new, output_scale=r)

    def grad_stat(  # noqa: D102
        self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...], state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        window = torch.cat([state.window_g[1:], batch])  # by backward, not by step: some forwards have none
        value = torch.where(self._batch_phase(step, state), batch, window.mean(0, keepdim=True))
        return value, {"window_g": window}
