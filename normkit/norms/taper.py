"""TaperNorm (Kanavalau, Amo Alonso & Lall 2026, arXiv:2602.10408)."""

from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import require
from normkit.kernels import reference, sync
from normkit.kernels.step_statistics import StepStatistics
from normkit.norms._base import Norm, Split
from normkit.norms._options import Count, OldShare, option
from normkit.norms._recompute import Records, snapshot
from normkit.norms._state import usable


class TaperNorm(Norm):
    """RMSNorm that turns into a fixed multiple of x during training.

    `y = x * (gate * weight / r(x) + (1 - gate) * c * gain)` with `r(x) = sqrt(mean(x^2) + eps)` of each token. In the
    k-th training forward `gate` is 1 while `k <= warmup`, falls as a cosine and is 0 from `k = until` on; then the norm
    folds. At the end of the warm-up c is fixed at the least-squares match of the two branches,
    `c = E[|x weight|^2 / r(x)] / E[|x weight|^2]`, averages over real tokens and the steps before, and `gain` starts as
    `weight`, to be learned separately. It is `gain = anchor + drift`, a buffer and a parameter. `.eval()` reads from
    the device if the gate has reached 0.

    Sources: the abstract, and descriptions of the paper by others, give the two branches, the form of the schedule and
    the formula of c. Not implemented: the LayerNorm form, and the auxiliary loss on the scale before the logits. The
    authors keep the final norm, or add that loss: a network without either can lower its loss by growing.

    Args:
        bias: Learn a `bias`; off, as in RMSNorm.
        sync: Average over all processes of the default group; off, as it costs one all-reduce per forward.
        alpha: Share of the old averages per step; our choice, as no published value is known.
        warmup: Training forwards as a plain RMSNorm; our choice.
        until: Training forward in which the gate reaches 0; our choice.

    >>> norm = TaperNorm(2, warmup=1, until=3, eps=0.0)
    >>> [norm(torch.tensor([[3.0, 3.0]])).mean().round(decimals=4).item() for _ in range(3)]
    [1.0, 1.0, 1.0]
    >>> norm.eval()(torch.tensor([[6.0, 6.0]])).round(decimals=4).tolist()
    [[2.0, 2.0]]
    """

    with_bias: bool = option(default=False, alias="bias")
    sync: bool = False
    alpha: OldShare = 0.99
    warmup: Count = 4000
    until: Count = 20_000

    def build(self) -> None:  # noqa: D102
        allowed = f"a whole number >= {self.warmup + 1}, after the warm-up"
        require(self.until > self.warmup, "until", self.until, allowed)
        super().build()
        self.drift = nn.Parameter(torch.zeros(self.dim)) if self.affine else None
        self.anchor = nn.Buffer(torch.ones(self.dim))
        self.energy = nn.Buffer(torch.zeros(2))  # averages of |x weight|^2 / r and of |x weight|^2
        self.step = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.skipped = nn.Buffer(torch.zeros((), dtype=torch.long))
        self._records = Records()
        self.tapered = False  # in evaluation mode: the gate is 0, so exported graphs compute no statistics

    def reset_parameters(self) -> None:  # noqa: D102
        self.reset_warmup()
        super().reset_parameters()
        nn.init.zeros_(self.skipped)
        nn.init.ones_(self.anchor)

    def gains(self) -> nn.Parameter | None:
        """Return the gain in use: `weight` during the warm-up, then the separately learned one."""
        if self.weight is None or self.drift is None or self.step.is_meta or int(self.step) <= self.warmup:
            return self.weight
        return nn.Parameter((self.anchor + self.drift).detach(), self.weight.requires_grad)

    def reset_warmup(self) -> None:
        """Restart as an RMSNorm with the present gain."""
        with torch.no_grad():
            if self.weight is not None and self.drift is not None:
                self.weight.copy_(torch.where(self.step > self.warmup, self.anchor + self.drift, self.weight))
                self.drift.zero_()
            self.step.zero_()
            self.energy.zero_()
        self.tapered = False

    @property
    def offline(self) -> bool:  # type: ignore[override]
        """True once the gate is 0. Waits for the device."""
        return not self.step.is_meta and int(self.step) >= self.until

    def train(self, mode: bool = True) -> "TaperNorm":  # noqa: D102
        super().train(mode)
        self.tapered = not mode and self.offline
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.train(self.training)

    def gate(self, step: Tensor) -> Tensor:
        """Return the share of the RMSNorm in a step: 1, then half a cosine, then 0."""
        done = ((step - self.warmup).to(self.energy.dtype) / (self.until - self.warmup)).clamp(0, 1)
        return (1 + torch.cos(torch.pi * done)) / 2 * (done < 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize `x[..., dim]`; in training, count the step and update the averages."""
        mask = self.check(x, mask)
        if self.tapered:
            y = reference.affine(x, self._fixed(self._match(), self.anchor), self.bias)
            return y if y.dtype == x.dtype else y.to(x.dtype)
        wide = x.to(torch.promote_types(x.dtype, self.energy.dtype))
        inv = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        taken = self._advance(wide, inv, mask) if self.training else None
        if taken is None:
            gate, c, anchor = self.gate(self.step), self._match(), self.anchor
        else:
            gate, c, anchor = taken.step, taken.saved[0], taken.value
        own = inv if self.weight is None else inv * self.weight
        y = reference.affine(wide, gate * own + (1 - gate) * self._fixed(c, anchor), self.bias).to(x.dtype)
        if taken is not None:
            self._records.add(taken, y)
        return y

    @torch.no_grad()
    def _advance(self, x: Tensor, inv: Tensor, mask: Tensor | None) -> StepStatistics:
        """Count the step, and return its gate as `step`, its anchor as `value` and c as `saved`."""
        weight = torch.ones_like(self.anchor) if self.weight is None else self.weight.to(self.anchor.dtype)
        energy = (x * weight).square().sum(-1, keepdim=True)

        def measure(mask: Tensor | None) -> Tensor:
            keep = torch.ones_like(inv, dtype=torch.bool) if mask is None else mask[..., None]
            rows = [torch.where(keep, each, 0).sum() for each in (energy * inv, energy)]
            return torch.stack([*rows, keep.sum(dtype=x.dtype)])

        if recorded := self._records.find(x, measure):  # the forward is recomputed
            return recorded
        sums = batch = measure(mask)
        if self.sync:
            sums = sync.all_reduce(sums)
        means, count = sums[:2] / sums[2].clamp(min=1), sums[2]
        ok = usable(means, count)
        step = self.step + 1
        learning = ok & (step <= self.warmup)
        averages = self.energy.lerp(means.to(self.energy.dtype), 1 - self.alpha)
        self.energy.copy_(torch.where(learning, averages, self.energy))
        self.anchor.copy_(torch.where(learning, weight, self.anchor))
        self.skipped.add_(~ok)
        self.step.add_(ok)
        taken = StepStatistics(batch, self.anchor.clone(), count, self.gate(step), mask=mask, saved=(self._match(),))
        return snapshot(taken) if torch.compiler.is_compiling() else taken

    def _match(self) -> Tensor:
        """Return c; 0 before the first step, when the gate is 1."""
        return torch.where(self.energy[1] > 0, self.energy[0] / self.energy[1], 0)

    def _fixed(self, c: Tensor, anchor: Tensor) -> Tensor:
        """Return the final factors `[dim]`."""
        return c * (anchor if self.drift is None else anchor + self.drift)

    def split(self) -> Split:
        """Return `Split(identity, c * gain, bias)` if the gate is 0, else `Split(norm, 1, bias)`."""
        shift = torch.zeros_like(self.anchor) if self.bias is None else self.bias
        if self.offline:
            return Split(nn.Identity(), self._fixed(self._match(), self.anchor), shift)
        return Split(self._without("bias"), torch.ones_like(self.anchor), shift)
