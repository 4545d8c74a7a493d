"""Per-channel arithmetic over all real rows of `x[..., C]`: moments, standardize, its gradient, the all-reduce.

`k` rows of statistics describe a batch: `[2, C]` (mean, variance) where the mean is removed, else `[1, C]` (quadratic
mean). What the statistics *are* is the business of `normkit.norms`; nothing here knows a method's name. Where
`groups` are given, every row counts after layer-scale: each of its runs of `C / groups` channels divided by its root
mean square, which some kernels do on their way (`own` says where).
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from normkit.kernels import dispatch, fused
from normkit.kernels.kernel_rule import Decided, KernelRule, find_kernel_rule
from normkit.kernels.step_statistics import StepStatistics


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, dtype: torch.dtype | None = None, groups: int = 0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Statistics `[k, C]` of the real rows of `x`, and how many rows there are.

    `x` is `[..., C]`; `dtype` is the type to compute in, x's own where None; `mask` is `[...]`, True where a row is
    real. Without a real row the statistics are zero.

    >>> moments(torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([True, True, False]), center=True)
    (tensor([[2.],
            [1.]]), tensor(2.))
    """
    dtype = x.dtype if dtype is None else dtype
    if dtype is torch.float32 and dispatch.triton(x, "moments"):
        return dispatch.load().moments(x, mask, center)
    if native := dispatch.native_kernels(x, dtype):
        return native.moments(x, mask, center, groups, eps)
    rows, fast = x.reshape(-1, x.shape[-1]), fused.joins(x, dtype)
    if fast and mask is not None:  # a copy of the real rows costs less than plain operations on all of them
        (rows,), mask = _real(mask, fast, rows), None
    rows = rows if fast else rows.to(dtype)
    if mask is None:
        count = rows.new_full((), rows.shape[0], dtype=dtype)
        if rows.shape[0] == 0:
            return rows.new_zeros(1 + center, rows.shape[1], dtype=dtype), count
        if fast:
            mean, var = fused.column_moments(rows, dtype)
            return torch.stack([mean, var]) if center else torch.addcmul(var, mean, mean)[None], count
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


def pack(batch: Tensor, count: Tensor, origin: Tensor) -> Tensor:
    """Statistics as sums that add up over batches and processes: `[k * C + 1]`, the count last.

    Second moments are taken about `origin[0]` when there is a mean, so that the variance survives the subtraction.
    """
    if len(batch) == 2:
        offset = batch[0] - origin[0]
        batch = torch.stack([offset, batch[1] + offset.square()])
    return torch.cat([(batch * count).flatten(), count.view(1)])


def unpack(sums: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
    """What `pack` packed: joint statistics `[k, C]` and joint count."""
    count = sums[-1]
    batch = sums[:-1].view_as(origin) / count.clamp(min=1)
    if len(batch) == 2:
        batch = torch.stack([batch[0] + origin[0], (batch[1] - batch[0].square()).clamp(min=0)])
    return batch, count


def all_reduce(sums: Tensor) -> Tensor:
    """The sum over all processes of the default group; the tensor itself where there is no group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return sums
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    return wait_tensor(all_reduce(sums, "sum", torch.distributed.group.WORLD))  # type: ignore[arg-type]


class GradRule(Protocol):
    """What the backward pass asks of its owner: the gradient statistics to remove, given this batch's."""

    eps: float
    center: ClassVar[bool]
    sync: bool
    pad_grad: ClassVar[str]

    @property
    def uses_batch_gradient(self) -> bool:
        """True if the removed statistics are always this batch's, without any state."""
        ...

    def take_gradient(self, batch: Tensor, count: Tensor, step: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Gradient statistics `[k, C]` to remove, given this batch's; the owner updates its state."""
        ...

    def grad_known_in_advance(self, saved: tuple[Tensor, ...]) -> Tensor:
        """What `take_gradient` will return, where the forward pass had foretold statistics."""
        ...


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """As `once_differentiable`, which says nothing where the gradient itself is a constant: a penalty on it, say."""
    inner = once_differentiable(backward)

    @functools.wraps(backward)
    def outer(ctx: Any, *dys: Tensor) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(
                "norms by batch statistics cannot be differentiated twice (create_graph=True) while training; "
                "put them into evaluation mode, or take a norm of each token by itself"
            )
        return inner(ctx, *dys)

    return outer


class StandardizeOptions(NamedTuple):
    """Arguments of `Standardize` that have no gradient, beside the statistics.

    Attributes:
        norm: Decides which gradient statistics to remove.
        mask: `[...]`, True where a row is real.
        groups: Groups of layer-scale that the kernels apply on their way.
        one_pass: The statistics were known before this batch was read.
        y: The output, if a kernel has already written it.
    """

    norm: GradRule
    mask: Tensor | None
    groups: int = 0
    one_pass: bool = False
    y: Tensor | None = None


class Standardize(torch.autograd.Function):
    """`y = weight * (output_scale * z + output_shift) + bias`, `z = (x - mean) / sqrt(var + eps)`, statistics given.

    The backward pass removes the gradient statistics that the norm chooses (`s0` of `g`, `s1` of `g * z`):
    `dx = dx_scale * (g - s0 - z * s1) / sqrt(var + eps)` with `g = grad_scale * output_scale * weight * dy`. Rows of
    padding take part in `dweight` and `dbias`; they never move a statistic, so nothing is removed from their gradient.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, statistics, options):  # noqa: D102
        norm, mask, groups, one_pass, y = options
        ctx.norm, ctx.groups, ctx.one_pass, ctx.has_bias = norm, groups, one_pass, bias is not None
        ctx.save_for_backward(x, weight, mask, *statistics.tensors())
        if y is not None:
            return y
        given = (
            x,
            statistics.value,
            norm.eps,
            norm.center,
            weight,
            bias,
            statistics.output_scale,
            statistics.output_shift,
        )
        if kernels(x, statistics.value.dtype, "standardize"):
            return dispatch.load().standardize(*given)[0]
        return standardize(*given, groups=groups)[0]

    @staticmethod
    @_once
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, weight, mask, *tensors = ctx.saved_tensors
        norm, statistics = ctx.norm, StepStatistics.from_tensors(tensors)
        value, output_scale, grad_scale = statistics.value, statistics.output_scale, statistics.grad_scale
        on_gpu = kernels(x, value.dtype, "standardize_grad")
        plain = grad_scale is None and statistics.dx_scale is None and x.numel() > 0
        plain = plain and not torch.compiler.is_compiling()
        native = _native(dy, x, value.dtype, ctx.groups)
        if (on_gpu or native) and plain and (kernel_rule := find_kernel_rule(norm)):
            own, more = (dispatch.load(), ()) if on_gpu else (native, (ctx.groups,))
            assert own is not None
            known_in_advance = norm.grad_known_in_advance(statistics.saved) if ctx.one_pass else None
            gradients = own.differentiate(
                norm, kernel_rule, dy, x, weight, mask, statistics, known_in_advance, ctx.has_bias, *more
            )
            return *gradients, None, None
        op = dispatch.load().standardize_grad if on_gpu else functools.partial(standardize_grad, groups=ctx.groups)
        op = functools.partial(op, dy, x, value, norm.eps, norm.center)
        factor = _product(value.dtype, weight, output_scale, grad_scale)
        real = mask is not None and norm.pad_grad == "real"
        dx = None
        alone = norm.uses_batch_gradient and norm.center and mask is None and not norm.sync
        if alone and not native and _alike(dy, x, value.dtype):
            dx, sums = fused.own_gradient(dy, x, value[0], torch.rsqrt(value[1] + norm.eps), factor)
        elif ctx.one_pass:
            dx, sums = op(factor, statistics.dx_scale, mask, norm.grad_known_in_advance(statistics.saved), real=real)
        else:
            sums = op(mask=mask, real=real)[1]
        assert sums is not None
        dbias, dweight = sums[0], sums[1]  # of all rows, for the parameters
        for constant in (output_scale, grad_scale):
            dweight = dweight if constant is None else dweight * constant
        if (shift := statistics.output_shift) is not None:
            dweight = dweight + (shift if grad_scale is None else shift * grad_scale) * dbias
        if dx is None or ctx.one_pass:
            assert isinstance(sums, Tensor)
            grad_sums = sums[-2:] if norm.center else sums[-1:]  # of those that move statistics
            grad_sums = grad_sums if factor is None else grad_sums * factor
            grad_sums = all_reduce(grad_sums) if norm.sync else grad_sums
            count = statistics.count
            removed = norm.take_gradient(grad_sums / count.clamp(min=1), count, statistics.step, statistics.saved)
            dx = op(factor, statistics.dx_scale, mask, removed, sums=False)[0] if dx is None else dx
        dweight = None if weight is None else dweight.to(weight.dtype)
        dbias = dbias.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return dx, dweight, dbias, None, None


def own(x: Tensor, wide: torch.dtype) -> ModuleType | None:
    """Our kernels of columns, where they run eagerly on `x`: they can do what PyTorch has no kernels for.

    That is `standardize_and_moments` on one reading, a method's rules (`train`) and, with LAYER_SCALE, `groups`.
    """
    if wide is torch.float32 and not torch.compiler.is_compiling() and dispatch.runs(x, "standardize"):
        return dispatch.load()
    return dispatch.native_kernels(x, wide)


def infer(rule: Any, x: Tensor) -> Tensor | None:
    """A norm by its running statistics in one call, where kernels have one and nobody asks for a gradient."""
    if torch.is_grad_enabled() or not (kernels := dispatch.native_kernels(x, rule.running.dtype)):
        return None
    dispatch.triton(x, "infer")
    return kernels.infer(rule, x)


def standardize_and_moments(
    x: Tensor, stat: Tensor, eps: float, center: bool, weight: Tensor | None, bias: Tensor | None, mask: Tensor | None,
    groups: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`standardize` with given statistics, and the batch's own moments and count, on one reading of `x`."""
    if dispatch.triton(x, "standardize_and_moments"):
        y, fresh = dispatch.load().standardize(x, stat, eps, center, weight, bias, mask=mask, sums=True)
    else:
        y, fresh = standardize(x, stat, eps, center, weight, bias, mask=mask, sums=True, groups=groups)
    assert fresh is not None
    return y, fresh[0], fresh[1]


def train(
    rule: Any, kernel_rule: KernelRule, x: Tensor, mask: Tensor | None, known_in_advance: Tensor | None, groups: int
) -> Decided:  # fmt: skip
    """Sums over `x`, and what `rule` makes of them with its state moved: `train` of the kernels that `own` finds."""
    on_gpu = dispatch.triton(x, "moments" if known_in_advance is None else "standardize_and_moments")
    kernels, more = (dispatch.load(), ()) if on_gpu else (dispatch.load_native(), (groups,))
    return kernels.train(rule, kernel_rule, x, mask, known_in_advance, *more)


def kernels(x: Tensor, wide: torch.dtype, name: str) -> bool:
    """Whether the Triton kernel `name` of columns runs on `x`: they compute in float32."""
    return wide is torch.float32 and dispatch.triton(x, name)


def standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    output_scale: Tensor | None = None, shift: Tensor | None = None, mask: Tensor | None = None, sums: bool = False,
    groups: int = 0,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """`weight * (post * z + shift) + bias` with `z = (x - mean) / sqrt(var + eps)`; with `sums`, the moments of x too.

    As the kernel of `ops.triton` with this name; `sums` and `groups` are for where there are `own` kernels.

    >>> standardize(torch.tensor([[3.0], [5.0]]), torch.ones(2, 1), 0.0, True)[0].tolist()
    [[2.0], [4.0]]
    """
    scale = _product(stat.dtype, weight, output_scale)
    level = _product(stat.dtype, weight, shift) if shift is not None else None
    if bias is not None:
        level = bias.to(stat.dtype) if level is None else level + bias
    native, mean = dispatch.native_kernels(x, stat.dtype), stat[0] if center else None
    if native is None and fused.joins(x, stat.dtype):
        return fused.standardize(x, mean, stat[-1], scale, level, eps), None
    inv = torch.rsqrt(stat[-1] + eps)
    scale = inv if scale is None else inv * scale
    level = torch.zeros_like(scale) if level is None else level
    if native:
        return native.standardize(x, mean, scale, level, mask, sums=sums, groups=groups, eps=eps)
    return multiply_add(x, scale, level if mean is None else level - mean * scale), None


def standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None = None,
    dx_scale: Tensor | None = None, mask: Tensor | None = None, removed: Tensor | None = None, sums: bool = True,
    real: bool = False, groups: int = 0,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx where `removed`, the gradient statistics `[k, C]`, is given; with `sums`, sums of dy and dy * z, `[2, C]`.

    `factor` is what multiplies dy on its way to z (weight, post, gain). With `real` the sums are `[4, C]`: over all
    rows, then over real ones. As the kernel of `ops.triton` with this name.
    """
    wide, rows, dys = stat.dtype, x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
    fast, native = _alike(dys, rows, wide), _native(dys, rows, wide, groups)
    if not fast:
        rows, dys = rows.to(wide), dys.to(wide)
    inv = torch.rsqrt(stat[-1] + eps)
    mean = stat[0] if center else None  # z = (x - mean) * inv is never written out: both join [C] factors
    dy_coefficient = taken = out = dx = None
    if removed is not None:
        scale = inv if dx_scale is None else inv * dx_scale
        dy_coefficient = scale if factor is None else scale * factor
        taken = removed * -scale
    real = real and mask is not None
    if native:
        to_dx = None if taken is None or dy_coefficient is None else (dy_coefficient, taken[-1] * inv, taken[0])
        dx, out = native.gradient(
            dys, rows, mean, mask, to_dx=to_dx, sums=sums, real=real, groups=groups, eps=eps
        )  # fmt: skip
        if out is not None:
            out[1::2] *= inv
        return None if dx is None else dx.view(x.shape), out
    if sums:
        out = _sums(dys, rows, mean, inv)
        if mask is not None and real:
            some, beside = _real(mask, fast, dys, rows)
            out = torch.cat([out, _sums(some, beside, mean, inv)])
    if dy_coefficient is not None and taken is not None:
        if fast:
            dx = fused.standardize(rows, mean, stat[-1], taken[-1], taken[0] if center else None, eps)
        else:
            slope = taken[-1] * inv
            dx = multiply_add(rows, slope, taken[0] - slope * mean if mean is not None else torch.zeros_like(slope))
        if mask is not None:
            dx = dx.index_fill_(0, fused.where(~mask), 0) if fast else _real(mask, fast, dx)[0]
        if dx.dtype is wide:
            dx = dx.addcmul_(dys, dy_coefficient)
        else:  # halves on a CPU: two products rounded, then their sum, for a third of the time
            dx = fused.standardize(dys, None, fused.constant(1.0, dy_coefficient), dy_coefficient, None, 0.0).add_(dx)
        dx = dx.to(x.dtype).view(x.shape)
    return dx, out


def _real(mask: Tensor, fast: bool, *tensors: Tensor) -> list[Tensor]:
    """Rows `[N, C]` with zeros in the padding, or without it: the same to a sum."""
    if fast:
        some = fused.where(mask)
        return [rows.index_select(0, some) for rows in tensors]
    return [torch.where(mask.reshape(-1, 1), rows, 0) for rows in tensors]


def _native(dy: Tensor, x: Tensor, wide: torch.dtype, groups: int) -> ModuleType | None:
    """Our kernels for CPUs, where they run; with layer-scale a backward pass goes the way of its forward pass."""
    if groups:
        return dispatch.load_native()
    return dispatch.native_kernels(x, wide) if _alike(dy, x, wide) else None


def _alike(dy: Tensor, x: Tensor, wide: torch.dtype) -> bool:
    return dy.dtype is x.dtype and fused.joins(x, wide) and fused.joins(dy, wide)


def _product(wide: torch.dtype, *factors: Tensor | None) -> Tensor | None:
    given = [t.to(wide) for t in factors if t is not None]
    return functools.reduce(torch.mul, given) if given else None


def multiply_add(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift` with vectors `[C]` of a type to compute in; in the type of `x`.

    >>> multiply_add(torch.ones(2, 1), torch.tensor([3.0]), torch.tensor([0.5])).tolist()
    [[3.5], [3.5]]
    """
    alone = not torch.is_grad_enabled()
    if alone and (native := dispatch.native_kernels(x, scale.dtype)):
        return native.standardize(x, None, scale.contiguous(), shift.to(scale.dtype).contiguous())[0]
    if alone and fused.joins(x, scale.dtype):
        return fused.standardize(x, None, fused.constant(1.0, scale), scale, shift.to(scale.dtype), 0.0)
    if x.dtype == scale.dtype:  # no casts in an exported graph
        return torch.addcmul(shift, x, scale)
    wide = torch.promote_types(x.dtype, scale.dtype)
    return torch.addcmul(shift.to(wide), x.to(wide), scale.to(wide)).to(x.dtype)


def _sums(dy: Tensor, x: Tensor, mean: Tensor | None, inv: Tensor) -> Tensor:
    """The sums over rows of `dy` and of `dy * z`, `[2, C]`."""
    if fused.joins(x, inv.dtype):
        return torch.stack(fused.column_sums(dy, x, mean, inv))
    dy, x = dy.to(inv.dtype), x.to(inv.dtype)
    return torch.stack([dy.sum(0), (dy * (x if mean is None else x - mean)).sum(0) * inv])


@torch.library.custom_op("normkit::snapshot", mutates_args=())
def snapshot(tensors: list[Tensor]) -> list[Tensor]:
    """Copies that a compiled backward must keep instead of recomputing them.

    A compiled graph would otherwise recompute small tensors in the backward pass from the buffers that they were
    made of, which the forward pass has overwritten by then (seen with torch 2.13: window slots off by one). Activation
    checkpointing recomputes this op, too, unless it is told not to: RuntimeError where that happens.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "torch.compile recomputes a norm with statistics in the backward pass, and these have moved on by then; "
            "call torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=normkit.keep_statistics)"
        )
    return [t.clone() for t in tensors]


def keep_statistics() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """`context_fn` of activation checkpointing inside `torch.compile`: keeps what norms decided, a few numbers a norm.

    Without it compiled norms with statistics raise a RuntimeError in the backward pass. Eager ones do not need it.

    >>> from torch.utils.checkpoint import checkpoint
    >>> def block(x):
    ...     return checkpoint(torch.tanh, x, use_reentrant=False, context_fn=keep_statistics)
    >>> block(torch.zeros(1))  # or torch.compile(block)
    tensor([0.])
    """
    return create_selective_checkpoint_contexts([torch.ops.normkit.snapshot.default])


@snapshot.register_fake
def _(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]
