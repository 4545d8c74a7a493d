"""PowerNorm, MABN, UN and "batch" exactly as their authors' code computes them.

Use them to reproduce the authors' numbers and to load their checkpoints, and the norms of `normkit.NORMS` for anything
else. They keep the defects of that code: padded rows count in the means of the backward pass, a batch that is all
padding or not finite corrupts the state, two forwards before a backward share one state, recomputation counts twice,
half precision overflows, every step waits for the device.

Parameters and buffers have the names and shapes of the authors' code, so their checkpoints load with
`load_state_dict(strict=True)`; `modern()` converts to a norm of `NORMS`. The names come from

- `fairseq/modules/norms/mask_powernorm.py` (MaskPowerNorm) and `mask_syncbatchnorm.py` (MaskSyncBatchNorm, built by
  `--encoder-norm-self batch`), github.com/sIncerass/powernorm at 1159641;
- `image_classification/models/unified_normalization/unified_normalization.py` (UN1d),
  github.com/hikvision-research/Unified-Normalization at 6e8497f;
- `MABN.py` and `cls/networks/MABN.py` (MABN2d), github.com/megvii-model/MABN at 9a18b24 and 136491f.

    weight, bias                                        in all of them
    iters                                               our step
    running_phi | running_var                           our running
    ema_gz                                              UN: our psi; PowerNorm: our nu divided by (1 - alpha_bkw)
    buffer_x2, buffer_gz                                our window_x, window_g
    skip_counter                                        our filtered
    running_mean, running_var, num_batches_tracked      the "batch" baseline, as in torch
    sta_matrix, pre_x2, pre_gz                          the cls variant of MABN
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normkit._util import is_int, require
from normkit.kernels import ops
from normkit.norms import mabn, power, un
from normkit.norms._base import Norm, Split
from normkit.norms._options import Count, OldShare, Steps, Window, option_defaults
from normkit.norms._stat_norm import StatNorm

Gradients = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Released(Norm):
    """Base of the released norms.

    They take `x[..., dim]`, channels last, and a `mask` that is True where a token is real, as every norm of normkit.
    (The authors' own modules take other layouts, and masks that are True on padding.)

    Args:
        dim: Number of channels.
        eps: Added to the mean square before the root.
    """

    offline: ClassVar[bool] = True
    batch_free: ClassVar[bool] = False
    exact_grad: ClassVar[bool] = False
    pad_grad: ClassVar[str] = "all"  # the backward's means run over padded rows too, and these are corrected as well
    running: ClassVar[str] = "running_var"
    affine: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]
    with_bias: ClassVar[bool] = True  # pyright: ignore[reportIncompatibleVariableOverride]

    def build(self) -> None:
        """Create parameters and buffers, from the options in `self`."""
        super().build()
        self.weight: nn.Parameter  # pyright: ignore[reportIncompatibleVariableOverride]
        self.bias: nn.Parameter  # pyright: ignore[reportIncompatibleVariableOverride]
        self.iters = nn.Buffer(torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize `x[..., dim]`."""
        mask = self.check(x, mask)
        x = self.rest(x)
        if self.training:
            return _HandWritten.apply(x, self.weight, self.bias, mask, self)  # type: ignore[return-value]
        return x / torch.sqrt(self.statistic() + self.eps) * self.weight + self.bias

    def train_step(self, x: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor) -> tuple[Tensor, Gradients]:
        """Return output and gradient function of a training forward; update the state."""
        raise NotImplementedError

    def rest(self, x: Tensor) -> Tensor:
        """Transform each token before the norm."""
        return x

    def statistic(self) -> Tensor:
        """Return the running mean square `[dim]` of inference."""
        return getattr(self, self.running).view(-1)

    def split(self) -> Split:  # noqa: D102
        scale = self.weight / torch.sqrt(self.statistic() + self.eps)
        return Split(nn.Identity(), scale, self.bias)

    @property
    def spec(self) -> str:
        """Key of `RELEASED`, and the options."""
        name = next(name for name, kind in RELEASED.items() if kind is type(self))
        given = ", ".join(f"{key}={value!r}" for key, value in self._options().items())
        return f"released.{name}({given})"

    def reset_parameters(self) -> None:  # noqa: D102
        super().reset_parameters()
        for name, buffer in type(self)(self.dim, **self._options()).named_buffers():
            getattr(self, name).copy_(buffer)

    def reset_warmup(self) -> None:  # noqa: D102
        self.iters.zero_()

    def _options(self) -> dict:
        return {key: getattr(self, key) for key in option_defaults(type(self))}


class _HandWritten(torch.autograd.Function):
    """Training step with hand-written gradients."""

    @staticmethod
    def forward(ctx, x, weight, bias, mask, norm):
        y, ctx.gradients = norm.train_step(x, mask, weight, bias)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]
        return *ctx.gradients(dy), None, None


def _mean(a: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the mean `[dim]` over all rows, or over the real ones."""
    return (a if mask is None else a[mask]).reshape(-1, a.shape[-1]).mean(0)


def _sum(a: Tensor) -> Tensor:
    return a.reshape(-1, a.shape[-1]).sum(0)


class PowerNorm(Released):
    """MaskPowerNorm; the recipes use groups = heads and warmup = that of the learning rate."""

    offline = False  # GroupScaling1D is always there, at inference too
    running = "running_phi"

    groups: Count = 1
    alpha_fwd: OldShare = 0.9
    alpha_bkw: OldShare = 0.9
    warmup: Steps = 10_000

    def build(self) -> None:  # noqa: D102
        super().build()
        self.running_phi = nn.Buffer(torch.ones(1, self.dim, 1, 1))
        self.ema_gz = nn.Buffer(torch.zeros(1, self.dim, 1, 1))

    def rest(self, x: Tensor) -> Tensor:
        """Apply GroupScaling1D, to padded rows as well; its eps is always 1e-5."""
        return ops.group_rms(x, 1e-5, self.groups)

    def train_step(self, x: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor) -> tuple[Tensor, Gradients]:  # noqa: D102
        self.iters += 1
        t, eps = int(self.iters.item()), self.eps
        phi, ema = self.running_phi.view(-1), self.ema_gz.view(-1)
        v = _mean(x * x, mask)
        z = x / torch.sqrt((v if t <= self.warmup else phi) + eps)
        if t < self.warmup:
            phi.copy_(phi * (t - 1) / t + v / t)  # a cumulative average ...
        phi.copy_(self.alpha_fwd * phi + (1 - self.alpha_fwd) * v)  # ... and an exponential one, in the same step

        def gradients(dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            approximate = weight * dy - (1 - self.alpha_bkw) * ema * z
            ema.add_(_mean(approximate * z))
            return approximate / torch.sqrt(v + eps), _sum(dy * z), _sum(dy)  # v, whatever the forward divided by

        return weight * z + bias, gradients

    def split(self) -> Split:  # noqa: D102
        return Split(power.GroupRMS(self.groups, 1e-5), *super().split()[1:])

    def modern(self) -> power.PowerNorm:
        """Return the norm of `NORMS` with the same options and state."""
        norm = power.PowerNorm(
            self.dim, eps=self.eps, groups=self.groups, alpha_fwd=self.alpha_fwd, alpha_bkw=self.alpha_bkw,
            warmup=self.warmup, accumulate="released", warmup_grad="nu", denominator="batch",
        )  # fmt: skip
        _take_over(norm, self, running=self.running_phi, nu=(1 - self.alpha_bkw) * self.ema_gz)
        return norm


class MABN(Released):
    """MABN2d of `MABN.py`; `window` is their `real_B // B`, `alpha` their `momentum`."""

    window: Window = 16
    alpha: OldShare = 0.98
    warmup: Steps = 100

    def build(self) -> None:  # noqa: D102
        super().build()
        self.running_var = nn.Buffer(torch.ones(1, self.dim, 1, 1))
        self.buffer_x2 = nn.Buffer(torch.zeros(self.window, self.dim))
        self.buffer_gz = nn.Buffer(torch.zeros(self.window, self.dim))

    def train_step(self, x: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor) -> tuple[Tensor, Gradients]:  # noqa: D102
        self.iters += 1
        t, eps = int(self.iters.item()), self.eps
        var = self.running_var.view(-1)
        own = t <= self.window or t < self.warmup
        x2 = _mean(x * x, mask)
        self.buffer_x2[t % self.window] = x2
        v = x2 if own else self.buffer_x2.mean(0)
        r = _ratio(v, var, eps) if t > max(1000, self.warmup) else torch.ones_like(v)
        var.copy_(self.alpha * var + (1 - self.alpha) * v)
        z = x / torch.sqrt(v + eps)

        def gradients(dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            g = weight * dy * r
            gz = _mean(g * z)
            self.buffer_gz[t % self.window] = gz
            dx = (g - z * (gz if own else self.buffer_gz.mean(0))) / torch.sqrt(v + eps)
            return dx, _sum(dy * r * z), _sum(dy)

        return weight * r * z + bias, gradients

    def modern(self) -> mabn.MABN:
        """Return the norm of `NORMS` with the same options and state."""
        norm = mabn.MABN(self.dim, eps=self.eps, window=self.window, alpha=self.alpha, warmup=self.warmup)
        newest_last = self.buffer_gz.roll(-1 - int(self.iters) % self.window, 0)
        _take_over(norm, self, running=self.running_var, window_x=self.buffer_x2, window_g=newest_last)
        return norm


class MABNPairs(Released):
    """MABN2d of `cls/networks/MABN.py`, which imitates batches of two samples.

    One batch has `2 * window` samples: `x` is `[2 * window, ..., dim]`; each pair of samples is divided by the mean
    over the last `window` pairs, those of the batch before included. Every batch has the same number of samples; there
    is no mask.
    """

    window: Window = 16
    alpha: OldShare = 0.98

    def build(self) -> None:  # noqa: D102
        super().build()
        band = torch.ones(self.window, 2 * self.window).triu(1).tril(self.window)
        self.iters = nn.Buffer(torch.zeros(1))
        self.running_var = nn.Buffer(torch.ones(self.dim))
        self.sta_matrix = nn.Buffer(band / self.window)  # row i averages the pairs i + 1 ... i + window of old and new
        self.pre_x2 = nn.Buffer(torch.ones(self.window, self.dim))
        self.pre_gz = nn.Buffer(torch.zeros(self.window, self.dim))

    def train_step(self, x: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor) -> tuple[Tensor, Gradients]:  # noqa: D102
        if mask is not None or len(x) != 2 * self.window or x.dim() < 2:
            raise ValueError(
                f"MABNPairs(window={self.window}) trains on x[{2 * self.window}, ..., {self.dim}] without a mask; got "
                f"shape {tuple(x.shape)}{'' if mask is None else ' and a mask'}"
            )
        self.iters += 1
        first, eps, shape = self.iters.item() == 1, self.eps, x.shape
        x = x.reshape(self.window, -1, self.dim)  # pairs, two samples' positions, channels
        x2 = (x * x).mean(1)
        var = x2 if first else self.sta_matrix @ torch.cat([self.pre_x2, x2])
        r = torch.ones_like(var) if self.iters.item() < 100 else _ratio(var, self.running_var, eps)
        if first:
            self.running_var.copy_(var.mean(0))
        self.running_var.copy_(self.alpha * self.running_var + (1 - self.alpha) * var.mean(0))
        self.pre_x2.copy_(x2)
        inv, r = torch.rsqrt(var + eps)[:, None], r[:, None]
        z = x * inv

        def gradients(dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            dy = dy.reshape(z.shape)
            g = weight * dy * r
            gz = (g * z).mean(1)
            mean = gz if first else self.sta_matrix @ torch.cat([self.pre_gz, gz])
            self.pre_gz.copy_(gz)
            return ((g - z * mean[:, None]) * inv).reshape(shape), _sum(dy * r * z), _sum(dy)

        return (weight * r * z + bias).reshape(shape), gradients


class UN(Released):
    """UN1d; `window` is a number or (forward, backward), `alpha` their `momentum`."""

    window: int | tuple[int, int] = 4
    alpha: OldShare = 0.9
    warmup: Steps = 4000
    outlier_filtration: bool = False

    def build(self) -> None:  # noqa: D102
        windows = tuple(self.window) if isinstance(self.window, tuple | list) else (self.window, self.window)
        counts = len(windows) == 2 and all(is_int(size) and size >= 1 for size in windows)
        require(counts, "window", self.window, "a whole number >= 1, or two: (forward, backward)")
        super().build()
        self.running_var = nn.Buffer(torch.ones(self.dim))
        self.ema_gz = nn.Buffer(torch.zeros(self.dim))
        self.buffer_x2 = nn.Buffer(torch.zeros(windows[0], self.dim))
        self.buffer_gz = nn.Buffer(torch.zeros(windows[1], self.dim))
        self.skip_counter = nn.Buffer(torch.zeros(1, dtype=torch.long))

    def train_step(self, x: Tensor, mask: Tensor | None, weight: Tensor, bias: Tensor) -> tuple[Tensor, Gradients]:  # noqa: D102
        self.iters += 1
        t, eps = int(self.iters.item()), self.eps
        past_x, past_g, ema, var = self.buffer_x2, self.buffer_gz, self.ema_gz, self.running_var
        x2 = _mean(x * x, mask)
        skip = len(past_x) == 1
        spread = past_x.sqrt().var()  # one number: unbiased, over all entries, before this batch
        past_x[t % len(past_x)] = x2
        if self.outlier_filtration and t >= self.warmup:
            gap = past_x.mean(0) - past_x.log().mean(0).exp()
            if (gap > spread * len(past_x)).any():
                past_x[t % len(past_x)] = var
                self.skip_counter += 1
                skip = True
        v = x2 if t <= len(past_x) or t < self.warmup or skip else past_x.log().mean(0).exp()
        r = torch.ones_like(v) if t <= max(1000, self.warmup) or skip else _ratio(v, var, eps)
        var.copy_(self.alpha * var + (1 - self.alpha) * v)
        z = x / torch.sqrt(v + eps)

        def gradients(dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            g = weight * dy * r  # r is in the gradient and not in the output
            gz = _mean(g * z)
            past_g[t % len(past_g)] = ema if skip else gz
            mean = gz if t <= len(past_g) or t < self.warmup or skip else past_g.mean(0)
            ema.copy_(self.alpha * ema + (1 - self.alpha) * mean)
            dx = (g - z * (mean if skip else ema)) / torch.sqrt(v + eps)
            return dx, _sum(dy * r * z), _sum(dy)

        return weight * z + bias, gradients

    def modern(self) -> un.UN:
        """Return the norm of `NORMS` with the same options and state."""
        norm = un.UN(
            self.dim, eps=self.eps, window=len(self.buffer_x2), window_bkw=len(self.buffer_gz), alpha=self.alpha,
            warmup=self.warmup, outlier_filtration=self.outlier_filtration, warmup_grad="ema", compensate=True,
        )  # fmt: skip
        newest_last = self.buffer_gz.roll(-1 - int(self.iters) % len(self.buffer_gz), 0)
        _take_over(
            norm, self, running=self.running_var, psi=self.ema_gz, window_x=self.buffer_x2, window_g=newest_last,
            filtered=self.skip_counter,
        )  # fmt: skip
        return norm


class Batch(Released):
    """MaskSyncBatchNorm, the PowerNorm repository's "batch".

    Divides tokens by their root mean square, then applies torch's BatchNorm. Padded rows are replaced by the mean of
    the real ones and then counted, so the variance comes out too small and padded outputs are `bias`. Nothing is
    synchronized, despite the name. `alpha` is 1 - their `momentum`.
    """

    exact_grad = True
    offline = False

    alpha: OldShare = 0.95

    def build(self) -> None:  # noqa: D102
        super().build()
        del self.iters
        self.running_mean = nn.Buffer(torch.zeros(self.dim))
        self.running_var = nn.Buffer(torch.ones(self.dim))
        self.num_batches_tracked = nn.Buffer(torch.zeros((), dtype=torch.long))

    def rest(self, x: Tensor) -> Tensor:
        """Apply LayerScaling1D; its eps is always 1e-5."""
        return ops.group_rms(x, 1e-5, 1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # noqa: D102
        mask = self.check(x, mask)
        x = self.rest(x)
        if mask is not None:
            x = torch.where(mask[..., None], x, _mean(x, mask))
        if self.training:
            self.num_batches_tracked += 1
        y = F.batch_norm(
            x.reshape(-1, self.dim), self.running_mean, self.running_var, self.weight, self.bias, self.training,
            1 - self.alpha, self.eps,
        )  # fmt: skip
        return y.reshape(x.shape)

    def split(self) -> Split:  # noqa: D102
        _, scale, shift = super().split()
        return Split(power.GroupRMS(1, 1e-5), scale, shift - scale * self.running_mean)

    def reset_warmup(self) -> None:
        """Do nothing: this norm has no warm-up."""


def _ratio(v: Tensor, running: Tensor, eps: float) -> Tensor:
    return (torch.sqrt(v + eps) / torch.sqrt(running + eps)).clamp(1 / 5, 5)


def _take_over(norm: StatNorm, old: Released, **buffers: Tensor) -> None:
    norm.to(old.weight.device, old.weight.dtype).train(old.training)
    state = {"weight": old.weight, "bias": old.bias, "step": old.iters, **buffers}
    with torch.no_grad():
        for name, value in state.items():
            mine = getattr(norm, name)
            mine.copy_(value.reshape(mine.shape))


RELEASED: dict[str, type[Released]] = {
    "power": PowerNorm,
    "mabn": MABN,
    "mabn_cls": MABNPairs,
    "un": UN,
    "batch": Batch,
}
