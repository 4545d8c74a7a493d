"""Unified Normalization (Yang et al. 2022, arXiv:2208.01313, Algorithm 2)."""

from typing import Literal

import torch
from torch import Tensor

from normkit.kernels.kernel_rule import KernelRule
from normkit.norms._base import Stat, StatNorm, push
from normkit.norms._require import require, require_count, require_fraction


class UN(StatNorm):
    """Quadratic means smoothed by a geometric mean over the last `window` batches, gradient means likewise.

    Once `step > window` and `step >= warmup`: `v = exp(mean(log(window of mean(x^2))))` (Eq. 16),
    `z = x / sqrt(v + eps)`, `y = weight * z + bias`; the gradient removes `psi`, a running mean
    `psi <- alpha psi + (1 - alpha) mean(window of mean(g z))` (Eq. 17). Before that the batch's own values, with the
    exact gradient (`warmup_grad="ema"`: psi, as the released code). `running <- alpha running + (1 - alpha) v`.

    `outlier_filtration=True` (Eq. 19): where the window's arithmetic mean exceeds its geometric mean by more than
    `window * V(sqrt(window before))` in any channel, this step uses the batch's own statistics for the whole layer, and
    the windows record `running` and `psi` instead. `threshold="scalar"` is the released code's V, one unbiased
    variance over all entries; with "channel", one a channel as the paper's lemma reads, the filter fires in nearly
    every step. `hold=True` keeps `running` and `psi` still in such a step. `filtered` counts them. Off by default, as
    in the released recipes for text; the paper turns it on for images.

    `compensate=True` adds the released code's undocumented factor
    `r = clip(sqrt(v + eps) / sqrt(running + eps), 1/5, 5)` on the gradient after `max(compensate_after, warmup)` steps;
    the gradient of `weight` then no longer belongs to the output.

    Recorded values are floored at `eps`: one all-zero channel in one batch would otherwise make the geometric mean 0
    and the output 300 times too large for `window - 1` steps.

    >>> import torch
    >>> UN(1, window=2, eps=0.0)(torch.tensor([[3.0], [-3.0]])).tolist()
    [[1.0], [-1.0]]
    """

    exact_grad = False
    pad_grad = "real"
    window_x: Tensor
    window_g: Tensor
    psi: Tensor
    filtered: Tensor

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        sync: bool = False,
        steps_per_update: int = 1,
        window: int = 4,
        alpha: float = 0.9,
        warmup: int = 4000,
        outlier_filtration: bool = False,
        window_bkw: int | None = None,
        threshold: Literal["scalar", "channel"] = "scalar",
        hold: bool = False,
        warmup_grad: Literal["exact", "ema"] = "exact",
        compensate: bool = False,
        compensate_after: int = 1000,
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias, sync=sync, steps_per_update=steps_per_update)
        require_count("window", window)
        require_fraction("alpha", alpha)
        require_count("warmup", warmup, 0)
        if window_bkw is not None:
            require_count("window_bkw", window_bkw)
        require(threshold in ("scalar", "channel"), "threshold", threshold, '"scalar" or "channel"')
        require(warmup_grad in ("exact", "ema"), "warmup_grad", warmup_grad, '"exact" or "ema"')
        flags = {"outlier_filtration": outlier_filtration, "hold": hold, "compensate": compensate}
        for name, value in flags.items():
            require(isinstance(value, bool), name, value, "True or False")
        require_count("compensate_after", compensate_after, 0)
        self.window, self.alpha, self.warmup, self.window_bkw = window, alpha, warmup, window_bkw
        self.outlier_filtration, self.threshold, self.hold = outlier_filtration, threshold, hold
        self.warmup_grad, self.compensate, self.compensate_after = warmup_grad, compensate, compensate_after
        self.register_buffer("window_x", torch.zeros(window, dim))
        self.register_buffer("window_g", torch.zeros(window_bkw or window, dim))
        self.register_buffer("psi", torch.zeros(1, dim))
        self.register_buffer("filtered", torch.zeros((), dtype=torch.long))

    def _batch_phase(self, step: Tensor, window: Tensor) -> Tensor:
        """Too early to smooth; a window of one never smooths, which makes it PN-V."""
        return (step <= len(window)) | (step < self.warmup) | (self.window == 1)

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:  # noqa: D102
        early = self._batch_phase(step, self.window_x)
        floor = self.eps or torch.finfo(self.running.dtype).tiny
        window = push(self.window_x, step, batch[0].clamp(min=floor))
        skip = None
        if self.outlier_filtration:
            skip = ~early & self._is_outlier(window)
            window = torch.where(skip, push(self.window_x, step, self.running[0].clamp(min=floor)), window)
            early = early | skip
        value = torch.where(early, batch, _geometric_mean(window)[None].to(batch.dtype))
        state = {"window_x": window, "running": self.average(value)}
        if skip is not None:
            state["filtered"] = self.filtered + skip
            if self.hold:
                state["running"] = torch.where(skip, self.running, state["running"])
        grad_scale = None
        if self.compensate:
            r = torch.sqrt((value[0] + self.eps) / (self.running[0] + self.eps)).clamp(1 / 5, 5)
            late = step > max(self.compensate_after, self.warmup)
            grad_scale = torch.where(late if skip is None else late & ~skip, r, 1.0)
        return Stat(value, state, grad_scale=grad_scale, saved=() if skip is None else (skip,))

    def _is_outlier(self, window: Tensor) -> Tensor:
        before = self.window_x.sqrt()
        spread = before.var() if self.threshold == "scalar" else before.var(0)
        return (window.mean(0) - _geometric_mean(window) > spread * self.window).any()

    def grad_stat(self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        early, entry = self._batch_phase(step, self.window_g), batch
        skip = saved[0] if saved else None
        if skip is not None:
            early, entry = early | skip, torch.where(skip, self.psi, batch)
        window = push(self.window_g, step, entry[0])
        smooth = torch.where(early, batch, window.mean(0, keepdim=True))
        psi = self.alpha * self.psi + (1 - self.alpha) * smooth
        own = early if self.warmup_grad == "exact" else skip
        value = psi.to(batch.dtype) if own is None else torch.where(own, batch, psi.to(batch.dtype))
        if skip is not None and self.hold:
            psi = torch.where(skip, self.psi, psi)
        return value, {"window_g": window, "psi": psi}

    def kernel_rule(self) -> KernelRule | None:  # noqa: D102
        if self.outlier_filtration or self.compensate:
            return None
        rate, floor = 1 - self.alpha, self.eps or torch.finfo(self.running.dtype).tiny
        return KernelRule(
            "geometric", "windowed", rate, rate, warmup=self.warmup if self.window > 1 else 2**62, floor=floor,
            window=self.window_x, window_grad=self.window_g, smooth_grad=self.psi,
            exact_early=self.warmup_grad == "exact",
        )  # fmt: skip


def _geometric_mean(window: Tensor) -> Tensor:
    return window.log().mean(0).exp()
