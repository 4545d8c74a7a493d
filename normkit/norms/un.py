"""Unified Normalization (Yang et al. 2022, arXiv:2208.01313, Algorithm 2)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.kernels.rule import NEVER, KernelRule, Stat, push
from normkit.norms._options import OldShare, Warmup, Window
from normkit.norms._warmup import WarmupNorm


class UN(WarmupNorm):
    """Quadratic means smoothed by a geometric mean over the last `window` batches.

    Once `step > window` and `step >= warmup`: `v = exp(mean(log(window of mean(x^2))))` (Eq. 16),
    `z = x / sqrt(v + eps)`, `y = weight * z + bias`; the gradient removes `psi`, a running mean
    `psi <- alpha psi + (1 - alpha) mean(window of mean(g z))`, `g = weight * dy` (Eq. 17). Before that the batch's own
    values, with the exact gradient. `running <- alpha running + (1 - alpha) v`. After the warm-up the gradient is
    approximate by design.

    An outlier (Eq. 19) is a step in which the window's arithmetic mean exceeds its geometric mean by more than
    `window * V(sqrt(window before))` in any channel. With `outlier_filtration` such a step uses the batch's own
    statistics for the whole layer, the windows record `running` and `psi` instead, and `filtered` counts it.

    Recorded values are at least `eps`. Otherwise one all-zero channel in one batch would make the geometric mean 0 and
    the output 300 times too large for `window - 1` steps.

    Args:
        window: Batches per window of the forward pass; 4 as in the paper. 1 is PN-V.
        alpha: Share of the old running statistics per step; 0.9, as 0.6 fails in the paper's Table 10.
        warmup: Update from which on windows are used; "auto" ends the warm-up by drift (`WarmupNorm`). In the paper it
            is as long as the learning rate's, 4000.
        outlier_filtration: Filter outliers; off, as in the released recipes for text. The paper turns it on for images.
        window_bkw: Batches per window of the backward pass; None means `window`.
        alpha_bkw: Share of the old `psi` per step; None means `alpha`, 0 no momentum (rows 4 and 5 of the ablations).
        threshold: V: "scalar", one variance over all entries, as the released code; "channel", one per channel, as
            the paper's lemma reads. The filter is then active in nearly every step.
        form: "paper"; or "released", as the authors' code computes, for comparison: psi in the gradient from the first
            step, and after a thousand steps (or the warm-up) the gradient times an undocumented
            `r = clip(sqrt(v + eps) / sqrt(running + eps), 1/5, 5)`, so that of `weight` is not that of the output.

    >>> import torch
    >>> UN(1, window=2, eps=0.0)(torch.tensor([[3.0], [-3.0]])).tolist()
    [[1.0], [-1.0]]
    """

    window: Window = 4
    alpha: OldShare = 0.9
    warmup: Warmup = "auto"
    outlier_filtration: bool = False
    window_bkw: Window | None = None
    alpha_bkw: OldShare | None = None
    threshold: Literal["scalar", "channel"] = "scalar"
    form: Literal["paper", "released"] = "paper"

    def build(self) -> None:  # noqa: D102
        super().build()
        self.window_x = nn.Buffer(torch.zeros(self.window, self.dim))
        self.window_g = nn.Buffer(torch.zeros(self.window_bkw or self.window, self.dim))
        self.psi = nn.Buffer(torch.zeros(1, self.dim))
        self.filtered = nn.Buffer(torch.zeros((), dtype=torch.long))

    def _batch_phase(self, step: Tensor, window: Tensor, state: Any) -> Tensor:
        """Return True while statistics are the batch's own; always with a window of one."""
        return (step <= len(window)) | (step < self.end_of_warmup(state)) | (self.window == 1)

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor, state: Any) -> Stat:  # noqa: D102
        own = self._batch_phase(step, state.window_x, state)
        window = push(state.window_x, step, batch[0].clamp(min=self.floor))
        outlier = None
        if self.outlier_filtration:
            outlier = ~own & self._is_outlier(window, state)
            window = torch.where(outlier, push(state.window_x, step, state.running[0].clamp(min=self.floor)), window)
            own = own | outlier
        value = torch.where(own, batch, _geometric_mean(window)[None].to(batch.dtype))
        new = {"window_x": window, "running": self.average(value, state), **self.drift_state(batch, step, state)}
        if outlier is not None:
            new["filtered"] = state.filtered + outlier
        grad_scale = None
        if self.form == "released":
            r = torch.sqrt((value[0] + self.eps) / (state.running[0] + self.eps)).clamp(1 / 5, 5)
            late = self.is_later(step, 1000, state)
            grad_scale = torch.where(late if outlier is None else late & ~outlier, r, 1.0)
        return Stat(value, new, grad_scale=grad_scale, saved=() if outlier is None else (outlier,))

    def _is_outlier(self, window: Tensor, state: Any) -> Tensor:
        before = state.window_x.sqrt()
        spread = before.var() if self.threshold == "scalar" else before.var(0)
        return (window.mean(0) - _geometric_mean(window) > spread * self.window).any()

    def grad_stat(  # noqa: D102
        self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...], state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        early, entry = self._batch_phase(step, state.window_g, state), batch
        outlier = saved[0] if saved else None
        if outlier is not None:
            early, entry = early | outlier, torch.where(outlier, state.psi, batch)
        window = torch.cat([state.window_g[1:], entry])  # by backward, not by step: some forwards have none
        smooth = torch.where(early, batch, window.mean(0, keepdim=True))
        alpha = self.alpha if self.alpha_bkw is None else self.alpha_bkw
        psi = alpha * state.psi + (1 - alpha) * smooth
        exact = early if self.form == "paper" else outlier
        value = psi.to(batch.dtype) if exact is None else torch.where(exact, batch, psi.to(batch.dtype))
        return value, {"window_g": window, "psi": psi}

    def kernel_rule(self, state: Any) -> KernelRule | None:  # noqa: D102
        if self.form == "released" or (self.outlier_filtration and self.threshold == "channel"):
            return None
        rate, rate_grad = 1 - self.alpha, 1 - (self.alpha if self.alpha_bkw is None else self.alpha_bkw)
        warmup = self.kernel_warmup(state)
        if self.window == 1:
            warmup["warmup"] = NEVER
        return KernelRule(
            "geometric", "windowed", rate, rate_grad, floor=self.floor,
            window=state.window_x, window_grad=state.window_g, smooth_grad=state.psi,
            filtered=state.filtered if self.outlier_filtration else None, **warmup,
        )  # fmt: skip


def _geometric_mean(window: Tensor) -> Tensor:
    return window.log().mean(0).exp()
