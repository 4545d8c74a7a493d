"""PowerNorm (Shen et al. 2020, arXiv:2003.07845, Definition 3 and Algorithm 2)."""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from normkit.kernels import layout, ops
from normkit.kernels.rule import NEVER, KernelRule, Stat, read_with
from normkit.norms._base import Split
from normkit.norms._options import OldShare, Steps, Warmup
from normkit.norms._warmup import WarmupNorm


class PowerNorm(WarmupNorm):
    """Divide each channel by a running quadratic mean from *before* this batch.

    After the warm-up, with `psi`, `nu` from before the step and g = weight * dy: `z = x / sqrt(psi^2 + eps)` (Eq. 8),
    `y = weight * z + bias` (9), `psi^2 <- alpha_fwd psi^2 + (1 - alpha_fwd) mean(x^2)` (10); `dx = (g - nu z) /
    sqrt(psi^2 + eps)` (11, 12), `nu <- nu (1 - (1 - alpha_bkw) Gamma) + (1 - alpha_bkw) Lambda` with Gamma = mean(z^2),
    Lambda = mean(g z) (13). The gradient is approximate by design. During the warm-up the norm is PN-V with its exact
    gradient, while psi collects a plain average and nu is updated already.

    With `groups=0`, the paper's PN*, the norm folds. With groups, layer-scale stays at inference, as `rest`.

    Args:
        groups: Groups of channels for layer-scale: each group of a token is first divided by its root mean square. 1
            as in the paper, the number of heads in the released recipes, 0 for none.
        alpha_fwd: Share of the old `psi^2` per step; 0.9 as in the released code.
        alpha_bkw: Share of the old `nu` per step; 0.9 as in the released code.
        warmup: Updates by the batch's own statistics; "auto" ends the warm-up by drift (`WarmupNorm`); its
            average of psi reaches no further back than the one used later. In the paper it is as long as that of the
            learning rate, 4000.
        form: "paper"; or "released", as the authors' code computes, for comparison: an average and an EMA of psi in one
            step of the warm-up, nu in the gradient from the first step, and dx divided by the batch's own statistic.
            There a channel that is quiet in one batch gets a gradient up to 1/sqrt(eps) times too large.
        clamp: Keep nu's factor at 0 or above, as nu diverges once Gamma > 2 / (1 - alpha_bkw); off, as in the paper.

    >>> import torch
    >>> PowerNorm(1, groups=0, warmup=1, eps=0.0)(torch.tensor([[3.0], [-3.0]])).tolist()
    [[1.0], [-1.0]]
    """

    groups: Steps = 1
    alpha_fwd: OldShare = 0.9
    alpha_bkw: OldShare = 0.9
    warmup: Warmup = "auto"
    form: Literal["paper", "released"] = "paper"
    clamp: bool = False

    def build(self) -> None:  # noqa: D102
        super().build()
        self.nu = nn.Buffer(torch.zeros(1, self.dim))

    @property
    def offline(self) -> bool:  # type: ignore[override]
        """True without layer-scale: then nothing is computed at inference."""
        return self.groups == 0

    @property
    def _least_share(self) -> float:
        """Least share of a new value in the warm-up's average, whose length "auto" does not limit."""
        return 1 - self.alpha_fwd if self.warmup == "auto" else 0.0

    def split(self) -> Split:  # noqa: D102
        rest, scale, shift = super().split()
        return Split(GroupRMS(self.groups, self.eps) if self.groups else rest, scale, shift)

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor, state: Any) -> Stat:  # noqa: D102
        end = self.end_of_warmup(state)
        warm = step <= end
        before = state.running.to(batch.dtype)
        value = torch.where(warm, batch, before)
        samples = step.to(batch.dtype).clamp(max=1 / self._least_share) if self._least_share else step
        average = before + (batch - before) / samples
        if self.form == "released":  # the code's average ends one step before its warm-up does
            base = torch.where(step < end, average, before)
            running = base.lerp(batch, 1 - self.alpha_fwd)
        else:
            running = torch.where(warm, average, before.lerp(batch, 1 - self.alpha_fwd))
        gamma = batch / (value + self.eps)
        dx_scale = torch.sqrt((value[0] + self.eps) / (batch[0] + self.eps)) if self.form == "released" else None
        new = {"running": running, **self.drift_state(batch, step, state)}
        return Stat(value, new, dx_scale=dx_scale, saved=(state.nu, gamma))

    def grad_stat(  # noqa: D102
        self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...], state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        nu, gamma = saved
        end = self.end_of_warmup(state) if self.form == "paper" else 0
        lost = (1 - self.alpha_bkw) * gamma
        lost = lost.clamp(max=1) if self.clamp else lost
        new = read_with(batch, state.nu) - nu * lost + (1 - self.alpha_bkw) * batch
        return torch.where(step <= end, batch, nu.to(batch.dtype)), {"nu": new}

    def known_in_advance(self, state: Any) -> bool:  # noqa: D102
        end = self.known_end(state)
        return end < NEVER and self._steps.at_least(end, state.step)

    def kernel_rule(self, state: Any) -> KernelRule | None:  # noqa: D102
        if self.form == "released":
            return None
        return KernelRule(
            "running", "running", 1 - self.alpha_fwd, 1 - self.alpha_bkw, floor=self._least_share, clamp=self.clamp,
            smooth_grad=state.nu, **self.kernel_warmup(state),
        )  # fmt: skip


class GroupRMS(nn.Module):
    """Layer-scale as a module, which `power(groups=G)` computes for every token at inference."""

    def __init__(self, groups: int, eps: float):
        super().__init__()
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        """Divide each group of channels by its root mean square."""
        return layout.like(ops.group_rms(x, self.eps, self.groups), x)
