"""Moving Average Batch Normalization (Yan et al. 2020, arXiv:2001.06838)."""

from typing import Literal

import torch
from torch import Tensor

from normkit.kernels.kernel_rule import KernelRule
from normkit.norms._base import Stat, StatNorm, push
from normkit.norms._require import require, require_count, require_fraction, require_positive


class MABN(StatNorm):
    """Quadratic means and gradient means averaged over the last `window` batches.

    `form="megvii"` (default; every published MABN number came from this code): once `step > window` and
    `step >= warmup`, `v = mean(window of mean(x^2))`, before that the batch's own; `z = x / sqrt(v + eps)`,
    `y = weight * r * z + bias`; the gradient removes the mean of the last `window` values of `mean(g * z)`. After
    `max(renorm_after, warmup)` steps `r = clip(sqrt(v + eps) / sqrt(var + eps), 1/r_max, r_max)`, with the running var
    from before the step, constant to the gradient. `form="unp"` is how the UN paper describes MABN (Eq. 13-14): forward
    by the running value including this batch, no r. `running <- alpha running + (1 - alpha) v`.

    >>> import torch
    >>> MABN(1, window=2, eps=0.0)(torch.tensor([[3.0], [-3.0]])).tolist()
    [[1.0], [-1.0]]
    """

    exact_grad = False
    pad_grad = "real"
    window_x: Tensor
    window_g: Tensor

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        sync: bool = False,
        steps_per_update: int = 1,
        window: int = 16,
        alpha: float = 0.98,
        warmup: int = 100,
        form: Literal["megvii", "unp"] = "megvii",
        renorm_after: int = 1000,
        r_max: float = 5.0,
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias, sync=sync, steps_per_update=steps_per_update)
        require_count("window", window)
        require_fraction("alpha", alpha)
        require_count("warmup", warmup, 0)
        require(form in ("megvii", "unp"), "form", form, '"megvii" or "unp"')
        require_count("renorm_after", renorm_after, 0)
        require_positive("r_max", r_max)
        require(r_max >= 1, "r_max", r_max, "a number >= 1")
        self.window, self.alpha, self.warmup = window, alpha, warmup
        self.form, self.renorm_after, self.r_max = form, renorm_after, r_max
        self.register_buffer("window_x", torch.zeros(window, dim))
        self.register_buffer("window_g", torch.zeros(window, dim))

    def _batch_phase(self, step: Tensor) -> Tensor:
        return (step <= self.window) | (step < self.warmup)

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:  # noqa: D102
        window = push(self.window_x, step, batch[0])
        if self.form == "unp":
            running = self.average(batch)
            return Stat(torch.where(self._batch_phase(step), batch, running), {"window_x": window, "running": running})
        value = torch.where(self._batch_phase(step), batch, window.mean(0, keepdim=True))
        r = torch.sqrt((value[0] + self.eps) / (self.running[0] + self.eps)).clamp(1 / self.r_max, self.r_max)
        r = torch.where(step <= max(self.renorm_after, self.warmup), 1.0, r)
        return Stat(value, {"window_x": window, "running": self.average(value)}, output_scale=r)

    def grad_stat(self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        window = push(self.window_g, step, batch[0])
        value = torch.where(self._batch_phase(step), batch, window.mean(0, keepdim=True))
        return value, {"window_g": window}

    def kernel_rule(self) -> KernelRule | None:  # noqa: D102
        if self.form == "unp":
            return None
        return KernelRule(
            "arithmetic", "windowed", rate=1 - self.alpha, warmup=self.warmup, window=self.window_x,
            window_grad=self.window_g, until=(max(self.renorm_after, self.warmup), 0), bounds=(self.r_max, 0.0),
        )  # fmt: skip


def centralize_weight(weight: Tensor) -> Tensor:
    """The weight `[out, ...]` with each output's own mean removed, which belongs to MABN in convolutional networks.

    It takes away the mean that a norm by quadratic means leaves; pretrained weights need it too (MABN issue 2).
    As a parametrization: `torch.nn.utils.parametrize.register_parametrization(linear, "weight", CentralizeWeight())`.

    >>> import torch
    >>> centralize_weight(torch.tensor([[1.0, 3.0]])).tolist()
    [[-1.0, 1.0]]
    """
    return weight - weight.mean(dim=tuple(range(1, weight.dim())), keepdim=True)


class CentralizeWeight(torch.nn.Module):
    """`centralize_weight` as a parametrization."""

    def forward(self, weight: Tensor) -> Tensor:
        """The centred weight."""
        return centralize_weight(weight)
