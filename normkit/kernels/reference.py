"""The arithmetic of all norms in plain PyTorch; it defines what all kernels compute.

Per-token operations compute in float32 or wider and return the type of `x`. Per-channel statistics have `k` rows:
`[2, C]` (mean, variance) with the mean removed, else `[1, C]` (quadratic mean). `train_step` is a training step of a
norm with batch statistics. It takes four operations on rows from here, or from the module of other kernels: `moments`,
`standardize`, `gradient_sums` and `gradient`.
"""

import functools
from collections.abc import Callable
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.kernels import sync
from normkit.kernels.records import StepStatistics, snapshot
from normkit.kernels.rule import Rule, State, check_shape, usable

# -- per token --------------------------------------------------------------------------------------------------------


def row_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, groups: int = 1
) -> Tensor:  # fmt: skip
    """Normalize each row, or each of `groups` runs of consecutive channels.

    Args:
        x: `[..., C]`.
        weight: Factor of each channel or of all.
        bias: Addend of each channel.
        kind: "layer" centers and divides by the root of the biased variance plus `eps`; "rms" divides by the root of
            the mean square plus `eps`; "rms_plus_eps" adds `eps` to the root; "scale" divides by the length, at least
            `eps`.
        eps: See `kind`.
        groups: Number of runs.

    >>> row_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), None, None, "layer", 0.0, groups=2)
    tensor([[-1.,  1., -1.,  1.]])
    >>> row_norm(torch.tensor([[3.0, 4.0]]), None, None, "scale", 1e-5)
    tensor([[0.6000, 0.8000]])
    """
    wide = wide_type(x, weight, bias)
    if kind == "layer" and groups == 1:
        weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
        return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)
    rows = x.to(wide) if groups == 1 else x.to(wide).unflatten(-1, (groups, -1))
    if kind == "layer":
        y = F.layer_norm(rows, rows.shape[-1:], None, None, eps)
    elif kind == "rms":
        y = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    else:  # the gradient of a length is 0 at a row of zeros, that of a root is not finite
        length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
        y = rows / (length.clamp(min=eps) if kind == "scale" else length / rows.shape[-1] ** 0.5 + eps)
    return affine(y if groups == 1 else y.flatten(-2), weight, bias).to(x.dtype)


def group_sample(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int, mask: Tensor | None = None
) -> Tensor:
    """Normalize over a group's channels and all real positions of a sample.

    Wu & He 2018, Eq. 7. `x` is `[batch, ..., C]`; `mask` is `[batch, ...]`, True where a position is real.
    """
    split = x.to(wide_type(x, weight)).unflatten(-1, (groups, -1))  # [batch, ..., groups, C / groups]
    if split.numel() == 0:
        return affine(x, weight, bias).to(x.dtype)  # with gradients of zeros
    over = (*range(1, split.dim() - 2), split.dim() - 1)
    mean, var = moments_over(split, over, None if mask is None else mask[..., None, None])
    return affine(((split - mean) * torch.rsqrt(var + eps)).flatten(-2), weight, bias).to(x.dtype)


def moments_over(x: Tensor, axes: tuple[int, ...], keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over axes where `keep` is True; 0 and 1 if nowhere."""
    if keep is None:
        var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        return mean, var
    count = keep.expand_as(x).sum(axes, keepdim=True)
    mean = torch.where(keep, x, 0).sum(axes, keepdim=True) / count.clamp(min=1)
    squares = torch.where(keep, x - mean, 0).square().sum(axes, keepdim=True)
    return mean, torch.where(count > 0, squares, 1) / count.clamp(min=1)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`y * weight + bias`, either of them optional."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def wide_type(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """The type to compute in: float32, or wider for wider inputs."""
    types = (torch.float32, *(p.dtype for p in parameters if p is not None))
    return functools.reduce(torch.promote_types, types, x.dtype)


def differentiable_grad(op: Callable[..., Tensor], dy: Tensor, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of `op(*inputs)` that can be differentiated again."""
    needed = [t for t in inputs if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(op(*inputs), needed, dy, create_graph=True))
    return tuple(next(grads) if t is not None and t.requires_grad else None for t in inputs)


class NormalizeRows(torch.autograd.Function):
    """`row_norm` by the kernels of a module and their gradient; differentiated twice, by plain operations.

    The module has `row_norm(x, weight, bias, kind, eps, groups)`, which returns y and what the backward pass needs, and
    `row_norm_grad(dy, x, weight, bias, saved, kind, eps, groups, wanted)`, which returns the gradients, those of weight
    and bias where `wanted` is True.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, kind, eps, groups, module):  # noqa: D102
        y, saved = module.row_norm(x, weight, bias, kind, eps, groups)
        ctx.save_for_backward(x, weight, bias, saved)  # not a copy, which has no graph to differentiate twice
        ctx.how, ctx.module = (kind, eps, groups), module
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, weight, bias, saved = ctx.saved_tensors
        if torch.is_grad_enabled() or not torch._C._has_storage(dy):  # differentiated twice, or under vmap
            with torch.enable_grad():
                grads = differentiable_grad(lambda *given: row_norm(*given, *ctx.how), dy, x, weight, bias)
        else:
            grads = ctx.module.row_norm_grad(dy, x, weight, bias, saved, *ctx.how, ctx.needs_input_grad[1:3])
        return *grads, None, None, None, None


# -- per channel ------------------------------------------------------------------------------------------------------


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the real rows of `x`, and the number of these rows.

    Args:
        x: `[..., C]`.
        mask: `[...]`, True where a row is real. Without a real row the statistics are zero.
        center: Mean and variance; else the quadratic mean.
        dtype: Type to compute in; None for that of `x`.

    >>> moments(torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([True, True, False]), center=True)
    (tensor([[2.],
            [1.]]), tensor(2.))
    """
    rows = x.reshape(-1, x.shape[-1]).to(x.dtype if dtype is None else dtype)
    if mask is None:
        count = rows.new_full((), rows.shape[0])
        if rows.shape[0] == 0:
            return rows.new_zeros(1 + center, rows.shape[1]), count
        if center:
            mean = rows.mean(0)  # two passes: torch.var_mean over rows costs 15 times as much on a CPU
            return torch.stack([mean, (rows - mean).square_().mean(0)]), count
        return rows.square().mean(0, keepdim=True), count
    keep = mask.reshape(-1, 1)
    real = keep.sum(dtype=rows.dtype)
    count = real.clamp(min=1)
    rows = torch.where(keep, rows, 0)
    if center:
        mean = rows.sum(0) / count
        var = torch.where(keep, rows - mean, 0).square().sum(0) / count
        return torch.stack([mean, var]), real
    return rows.square().sum(0, keepdim=True) / count, real


def standardize(x: Tensor, stat: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`weight * (x - mean) / sqrt(var + eps) + bias` with statistics `[k, C]`; in the type of `x`.

    >>> standardize(torch.tensor([[3.0]]), torch.tensor([[1.0], [4.0]]), None, torch.ones(1), 0.0).tolist()
    [[2.0]]
    """
    return scale_shift(x, *scale_and_shift(stat, weight, bias, eps))


def scale_and_shift(
    stat: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The vectors `[C]` with which `standardize` is `x * scale + shift`."""
    scale = torch.rsqrt(stat[-1] + eps)
    scale = scale if weight is None else scale * weight
    if len(stat) == 2:
        shift = -stat[0] * scale
        return scale, shift if bias is None else shift + bias
    return scale, torch.zeros_like(scale) if bias is None else bias.expand_as(scale)


def scale_shift(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift` with vectors `[C]` of a type to compute in; in the type of `x`.

    >>> scale_shift(torch.ones(2, 1), torch.tensor([3.0]), torch.tensor([0.5])).tolist()
    [[3.5], [3.5]]
    """
    if x.dtype == scale.dtype:  # no casts in an exported graph
        return torch.addcmul(shift, x, scale)
    wide = torch.promote_types(x.dtype, scale.dtype)
    return torch.addcmul(shift.to(wide), x.to(wide), scale.to(wide)).to(x.dtype)


def gradient_sums(
    dy: Tensor, x: Tensor, mean: Tensor | None, mask: Tensor | None = None, real: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """Sums over rows of `dy` and of `dy * (x - mean)`, `[2, C]`; with `real` and a mask `[4, C]`.

    The last two are then those over real rows.

    >>> dy, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    >>> gradient_sums(dy, x, None, torch.tensor([True, False]), real=True).flatten().tolist()
    [3.0, 11.0, 1.0, 3.0]
    """
    rows, dys = (t.reshape(-1, x.shape[-1]).to(x.dtype if dtype is None else dtype) for t in (x, dy))
    sums = [dys.sum(0), (dys * (rows if mean is None else rows - mean)).sum(0)]
    if real and mask is not None:
        keep = mask.reshape(-1, 1)
        dys, rows = torch.where(keep, dys, 0), torch.where(keep, rows, 0)
        sums += [dys.sum(0), (dys * (rows if mean is None else rows - mean)).sum(0)]
    return torch.stack(sums)


def gradient(dy: Tensor, x: Tensor, mean: Tensor | None, coefficients: Tensor, mask: Tensor | None = None) -> Tensor:
    """`dx = a dy + b (x - mean) + c` with `coefficients [3, C]`; `a dy` alone where `mask` is False.

    There is no `c` without `mean`.

    >>> gradient(torch.ones(1, 1), torch.tensor([[3.0]]), torch.ones(1), torch.tensor([[1.0], [2.0], [3.0]])).item()
    8.0
    """
    of_dy, of_x, constant = coefficients
    rows, dys = (t.reshape(-1, x.shape[-1]).to(coefficients.dtype) for t in (x, dy))
    constant = torch.zeros_like(of_x) if mean is None else constant - of_x * mean
    dx = torch.addcmul(constant, rows, of_x)
    dx = dx if mask is None else torch.where(mask.reshape(-1, 1), dx, 0)
    return dx.addcmul_(dys, of_dy).to(x.dtype).view(x.shape)


def product(dtype: torch.dtype, *factors: Tensor | None) -> Tensor | None:
    """Product of the factors that are given, in `dtype`; None without any."""
    given = [t.to(dtype) for t in factors if t is not None]
    return functools.reduce(torch.mul, given) if given else None


# -- a training step of a norm with batch statistics ------------------------------------------------------------------


def train_step(
    x: Tensor, mask: Tensor | None, rule: Rule, state: State, kernels: ModuleType, wide: torch.dtype,
    found: StepStatistics | None = None,
) -> tuple[Tensor, StepStatistics]:  # fmt: skip
    """Normalize a batch `[..., C]` by a rule, and move the state; return y and the decisions.

    `kernels` implements the four operations, `wide` is the type of statistics. `found` are decisions of an earlier
    forward on this batch, which moved the state already.
    """
    with torch.no_grad():
        statistics = decide(x.detach(), mask, rule, state, kernels, wide) if found is None else found
        if torch.compiler.is_compiling():
            statistics = snapshot(statistics)
    affine = (  # kernels would read past the end of a parameter with fewer numbers
        p if p is None or p.shape == (rule.dim,) else p.expand(rule.dim).contiguous() for p in (rule.weight, rule.bias)
    )
    return Standardize.apply(x, *affine, statistics, rule, state, kernels), statistics  # type: ignore[return-value]


def decide(
    x: Tensor, mask: Tensor | None, rule: Rule, state: State, kernels: ModuleType, wide: torch.dtype
) -> StepStatistics:  # fmt: skip
    """Measure the batch, apply the rule and move the state."""
    local, count = kernels.moments(x, mask, rule.center, wide)
    batch, count = sync.join_processes(local, count, state.processes) if state.processes else (local, count)
    ok = usable(batch, count)
    batch = torch.where(ok, batch, state.running.to(batch.dtype))  # not finite, or all padding: as the average batch
    step = state.step + 1
    stat = rule.train_stat(batch, step, count, state)
    check_shape("Stat.value", stat.value, batch)
    value, new = stat.value.clone(), stat.state  # the value may be a buffer, which changes below
    saved = tuple(t.clone() for t in stat.saved)
    if state.follows_optimizer:  # this batch is standardized by itself; the state changes by all batches together
        joint, rows = state.join("pending", batch, count, ok, rule.center)
        together = rule.train_stat(joint, step, rows, state)
        new, saved = together.state, (*saved, *(t.clone() for t in together.saved))
    state.write({**new, "step": step}, ok)
    state.skipped.add_(~ok)
    scales = stat.output_scale, stat.output_shift, stat.grad_scale, stat.dx_scale
    return StepStatistics(local, value, count, step, *scales, mask, saved=saved)


@torch.no_grad()
def take_gradient(batch: Tensor, statistics: StepStatistics, rule: Rule, state: State) -> Tensor:
    """Return the gradient statistics `[k, C]` to remove from dx, and move the state."""
    saved = statistics.saved
    own = len(saved) // (1 + state.follows_optimizer)
    value, new = rule.grad_stat(batch, statistics.step, saved[:own], state)
    check_shape("gradient statistics", value, batch)
    if not new:
        return value
    if not torch.compiler.is_compiling() and type(batch) is Tensor and not torch._C._has_storage(batch):
        raise RuntimeError("gradients under vmap would move this norm's state together; take one after the other")
    ok = usable(batch, statistics.count)
    if state.follows_optimizer:
        joint, _ = state.join("pending_grad", batch, statistics.count, ok)
        new = rule.grad_stat(joint, statistics.step, saved[own:], state)[1]
    state.write(new, ok)
    state.skipped_grad.add_(~ok)
    return value


class Standardize(torch.autograd.Function):
    """Standardize with given statistics, then scale and shift.

    `y = weight * (output_scale * z + output_shift) + bias` with `z = (x - mean) / sqrt(var + eps)`. The backward pass
    removes the gradient statistics that the rule chooses (`s0` of `g`, `s1` of `g * z`):
    `dx = dx_scale * (g - s0 - z * s1) / sqrt(var + eps)` with `g = grad_scale * output_scale * weight * dy`. Rows of
    padding take part in `dweight` and `dbias`; they never move a statistic, so nothing is removed from their gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, statistics, rule, state, kernels):  # noqa: D102
        ctx.rule, ctx.state, ctx.kernels, ctx.has_bias = rule, state, kernels, bias is not None
        ctx.save_for_backward(x, weight, *statistics.tensors())
        value = statistics.value
        scale, shift = statistics.output_scale, statistics.output_shift
        if shift is not None:
            bias = affine(shift, weight, bias)
        weight = weight if scale is None else affine(scale, weight, None)
        return kernels.standardize(x, value, weight, bias, rule.eps)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        # once_differentiable gives no error if the gradient itself is a constant, as in a penalty on the gradient
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(
                "norms with batch statistics cannot be differentiated twice (create_graph=True) while training; "
                "put them into evaluation mode, or take a per-token norm"
            )
        x, weight, *tensors = ctx.saved_tensors
        statistics, rule, kernels = StepStatistics.from_tensors(tensors), ctx.rule, ctx.kernels
        value, mask, wide = statistics.value, statistics.mask, statistics.value.dtype
        inv, mean = torch.rsqrt(value[-1] + rule.eps), value[0] if rule.center else None
        real = mask is not None and rule.pad_grad == "real"
        sums = kernels.gradient_sums(dy, x, mean, mask, real, wide)
        plain, along = sums[::2], sums[1::2] * inv  # of all rows, then of real ones, which move the state
        factor = product(wide, weight, statistics.output_scale, statistics.grad_scale)
        batch = torch.stack([plain[-1], along[-1]]) if rule.center else along[-1:]
        batch = sync.all_reduce(batch if factor is None else batch * factor, ctx.state.processes)
        removed = take_gradient(batch / statistics.count.clamp(min=1), statistics, rule, ctx.state)
        if (dx_scale := statistics.dx_scale) is not None:
            factor, removed = product(wide, factor, dx_scale), removed * dx_scale
        of_dy, removed = inv if factor is None else inv * factor, removed * -inv
        coefficients = torch.stack([of_dy, removed[-1] * inv, removed[0]])
        dx = kernels.gradient(dy, x, mean, coefficients, mask)
        dbias, dweight = plain[0], along[0]
        for constant in (statistics.output_scale, statistics.grad_scale):
            dweight = dweight if constant is None else dweight * constant
        if (shift := statistics.output_shift) is not None:
            dweight = dweight + (shift if statistics.grad_scale is None else shift * statistics.grad_scale) * dbias
        dweight = None if weight is None else dweight.to(weight.dtype)
        dbias = dbias.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None, None, None
