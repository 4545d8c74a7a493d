"""PowerNorm (Shen et al. 2020, arXiv:2003.07845, Definition 3 and Algorithm 2)."""

from typing import Literal

import torch
from torch import Tensor, nn

from normkit.kernels import rows
from normkit.kernels.kernel_rule import KernelRule
from normkit.norms._base import Split, Stat, StatNorm
from normkit.norms._require import require, require_count, require_fraction


class PowerNorm(StatNorm):
    """Divide each channel by a running quadratic mean from *before* this batch, with an approximate backward.

    After `warmup` forwards, with `psi`, `nu` from before the step and g = weight * dy:
    `z = x / sqrt(psi^2 + eps)` (Eq. 8), `y = weight * z + bias` (9),
    `psi^2 <- alpha_fwd psi^2 + (1 - alpha_fwd) mean(x^2)` (10); `dx = (g - nu z) / sqrt(psi^2 + eps)` (11, 12),
    `nu <- nu (1 - (1 - alpha_bkw) Gamma) + (1 - alpha_bkw) Lambda` with Gamma = mean(z^2), Lambda = mean(g z) (13).
    During the warm-up it is PN-V with its exact gradient, while psi gathers a plain average and nu gathers already.

    `groups=G` first divides each run of `dim / G` channels of a token by its root mean square (the paper's layer-scale:
    one group; the released recipes: one a head). That part is online: such a norm keeps it as `rest` and cannot be
    folded away. `groups=0`, the paper's PN*, can.

    Other readings of paper and code: `accumulate="ema"` (Eq. 10 from the first step) or "released" (the code's average
    *and* EMA in one step); `warmup_grad="nu"` (the running nu during the warm-up too); `denominator="batch"` (dx
    divided by the batch's own statistic, as the released code: a channel quiet in one batch gets a gradient up to
    1/sqrt(eps) times too large); `clamp=True` keeps nu's factor from going below 0 (nu diverges once
    Gamma > 2 / (1 - alpha_bkw)).

    >>> import torch
    >>> PowerNorm(1, groups=0, warmup=1, eps=0.0)(torch.tensor([[3.0], [-3.0]])).tolist()
    [[1.0], [-1.0]]
    """

    exact_grad = False
    pad_grad = "real"
    nu: Tensor

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        sync: bool = False,
        steps_per_update: int = 1,
        groups: int = 1,
        alpha_fwd: float = 0.9,
        alpha_bkw: float = 0.9,
        warmup: int = 4000,
        accumulate: Literal["average", "ema", "released"] = "average",
        warmup_grad: Literal["exact", "nu"] = "exact",
        denominator: Literal["forward", "batch"] = "forward",
        clamp: bool = False,
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias, sync=sync, steps_per_update=steps_per_update)
        require_count("groups", groups, 0)
        require(groups == 0 or dim % groups == 0, "groups", groups, f"0, or a divisor of dim={dim}")
        require_fraction("alpha_fwd", alpha_fwd)
        require_fraction("alpha_bkw", alpha_bkw)
        require_count("warmup", warmup, 0)
        forms = ("average", "ema", "released")
        require(accumulate in forms, "accumulate", accumulate, f"one of {', '.join(forms)}")
        require(warmup_grad in ("exact", "nu"), "warmup_grad", warmup_grad, '"exact" or "nu"')
        require(denominator in ("forward", "batch"), "denominator", denominator, '"forward" or "batch"')
        require(isinstance(clamp, bool), "clamp", clamp, "True or False")
        self.groups, self.alpha_fwd, self.alpha_bkw, self.warmup = groups, alpha_fwd, alpha_bkw, warmup
        self.accumulate, self.warmup_grad, self.denominator, self.clamp = accumulate, warmup_grad, denominator, clamp
        self.register_buffer("nu", torch.zeros(1, dim))

    @property
    def offline(self) -> bool:  # type: ignore[override]
        """True without layer-scale: then nothing is computed at inference."""
        return self.groups == 0

    def split(self) -> Split:  # noqa: D102
        rest, scale, shift = super().split()
        return Split(GroupRMS(self.groups, self.eps) if self.groups else rest, scale, shift)

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:  # noqa: D102
        warm = step <= self.warmup
        before = self.running.to(batch.dtype)
        value = torch.where(warm, batch, before)
        average = before + (batch - before) / step
        if self.accumulate == "ema":
            running = before.lerp(batch, 1 - self.alpha_fwd)
        elif self.accumulate == "released":  # the code's average ends one step before its warm-up does
            base = torch.where(step < self.warmup, average, before)
            running = base.lerp(batch, 1 - self.alpha_fwd)
        else:
            running = torch.where(warm, average, before.lerp(batch, 1 - self.alpha_fwd))
        gamma = batch / (value + self.eps)
        dx_scale = torch.sqrt((value[0] + self.eps) / (batch[0] + self.eps)) if self.denominator == "batch" else None
        return Stat(value, {"running": running}, dx_scale=dx_scale, saved=(self.nu.clone(), gamma))

    def known_in_advance(self) -> Tensor | None:  # noqa: D102
        return self.running if self._steps.at_least(self.warmup, self.step) else None

    def grad_known_in_advance(self, saved: tuple[Tensor, ...]) -> Tensor:  # noqa: D102
        return saved[0]

    def grad_stat(self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:  # noqa: D102
        nu, gamma = saved
        exact = (step <= self.warmup) if self.warmup_grad == "exact" else torch.zeros_like(step, dtype=torch.bool)
        lost = (1 - self.alpha_bkw) * gamma
        new = self.nu - nu * (lost.clamp(max=1) if self.clamp else lost) + (1 - self.alpha_bkw) * batch
        return torch.where(exact, batch, nu.to(batch.dtype)), {"nu": new}

    def kernel_rule(self) -> KernelRule | None:  # noqa: D102
        if self.accumulate != "average" or self.denominator == "batch":
            return None
        return KernelRule(
            "stale", "stale", 1 - self.alpha_fwd, 1 - self.alpha_bkw, self.warmup, clamp=self.clamp,
            exact_early=self.warmup_grad == "exact", smooth_grad=self.nu,
        )  # fmt: skip


class GroupRMS(nn.Module):
    """PowerNorm's layer-scale as a module: what `power(groups=G)` computes for every token, at inference too."""

    def __init__(self, groups: int, eps: float):
        super().__init__()
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        """Each run of channels divided by its root mean square."""
        return rows.group_rms(x, self.eps, self.groups)
