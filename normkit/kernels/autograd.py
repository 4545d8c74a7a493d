"""Autograd Function of norms with batch statistics: training forward, analytic backward."""

import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from normkit.kernels import dispatch, fused, ops, reference
from normkit.kernels.step_statistics import StepStatistics
from normkit.kernels.sync import all_reduce


class Standardize(torch.autograd.Function):
    """Standardize with given statistics, then scale and shift.

    `y = weight * (output_scale * z + output_shift) + bias` with `z = (x - mean) / sqrt(var + eps)`. The backward pass
    removes the gradient statistics that the norm chooses (`s0` of `g`, `s1` of `g * z`):
    `dx = dx_scale * (g - s0 - z * s1) / sqrt(var + eps)` with `g = grad_scale * output_scale * weight * dy`. Rows of
    padding take part in `dweight` and `dbias`; they never move a statistic, so nothing is removed from their gradient.
    `norm` is a StatNorm, which decides what to remove; `groups` are those of layer-scale that the kernels apply, too.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, statistics, norm, groups):  # noqa: D102
        ctx.norm, ctx.groups, ctx.has_bias = norm, groups, bias is not None
        ctx.block, ctx.buffers = dispatch.current_block(), {} if torch.compiler.is_compiling() else dict(norm._buffers)
        ctx.save_for_backward(x, weight, *statistics.tensors())
        output_scale, output_shift = statistics.output_scale, statistics.output_shift
        scale = weight if output_scale is None else reference.affine(output_scale, weight, None)
        shift = bias if output_shift is None else reference.affine(output_shift, weight, bias)
        return ops.standardize(x, statistics.value, norm.eps, norm.center, scale, shift, groups)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        # once_differentiable gives no error if the gradient itself is a constant, as in a penalty on the gradient
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            raise RuntimeError(
                "norms with batch statistics cannot be differentiated twice (create_graph=True) while training; "
                "put them into evaluation mode, or take a per-token norm"
            )
        x, weight, *tensors = ctx.saved_tensors
        given = ctx, dy, x, weight, StepStatistics.from_tensors(tensors)
        if torch.compiler.is_compiling():
            return *_backward(*given), None, None, None
        own, vars(ctx.norm)["_buffers"] = ctx.norm._buffers, ctx.buffers  # those of functional_call are gone by now
        try:
            with dispatch.resumed(ctx.block):
                return *_backward(*given), None, None, None
        finally:
            vars(ctx.norm)["_buffers"] = own


def _backward(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, statistics: StepStatistics
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, weight and bias."""
    norm, value, mask, saved = ctx.norm, statistics.value, statistics.mask, statistics.saved
    output_scale, grad_scale = statistics.output_scale, statistics.grad_scale
    kind = ops.select_grad(dy, x, value.dtype, ctx.groups)
    op = functools.partial(
        ops.standardize_grad, dy, x, value, norm.eps, norm.center, mask=mask, groups=ctx.groups, kind=kind
    )
    factor = reference.product(value.dtype, weight, output_scale, grad_scale)
    real = mask is not None and norm.pad_grad == "real"
    processes = norm.process_groups()
    whole_batch = norm.uses_batch_gradient and norm.center and mask is None and not processes
    if whole_batch and kind == "fused" and dy.dtype is x.dtype:
        dx, sums = fused.own_gradient(dy, x, value[0], torch.rsqrt(value[1] + norm.eps), factor)
    else:
        sums = op(real=real)[1]
        assert sums is not None
        grad_sums = sums[-2:] if norm.center else sums[-1:]  # of real rows, which come last: they move the state
        grad_sums = grad_sums if factor is None else grad_sums * factor
        grad_sums = all_reduce(grad_sums, processes)
        count = statistics.count
        removed = norm.take_gradient(grad_sums / count.clamp(min=1), count, statistics.step, saved)
        if (dx_scale := statistics.dx_scale) is not None:
            factor, removed = reference.product(value.dtype, factor, dx_scale), removed * dx_scale
        dx = op(factor, removed=removed, sums=False)[0]
    dbias, dweight = sums[0], sums[1]  # of all rows
    for constant in (output_scale, grad_scale):
        dweight = dweight if constant is None else dweight * constant
    if (shift := statistics.output_shift) is not None:
        dweight = dweight + (shift if grad_scale is None else shift * grad_scale) * dbias
    dweight = None if weight is None else dweight.to(weight.dtype)
    dbias = dbias.to(x.dtype if weight is None else weight.dtype) if ctx.has_bias else None
    return dx, dweight, dbias


@torch.library.custom_op("normkit::snapshot", mutates_args=())
def snapshot(tensors: list[Tensor]) -> list[Tensor]:
    """Copies that a compiled backward must keep instead of recomputing them.

    A compiled graph would otherwise recompute small tensors in the backward pass from the buffers that they were made
    of. The forward pass has overwritten these by then (seen with torch 2.13: window slots off by one). Activation
    checkpointing recomputes this op, too, unless `keep_statistics` excludes it: a RuntimeError.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "a compiled norm is recomputed in the backward pass, and its statistics have moved on; compile what calls "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=normkit.keep_statistics)"
        )
    return [t.clone() for t in tensors]


@snapshot.register_fake
def _(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


def keep_statistics() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Keep the decisions of norms when `torch.compile` recomputes activations.

    They are a few numbers for each norm. Pass it as `context_fn`, and compile the function that calls `checkpoint`:
    otherwise compiled norms with batch statistics raise a RuntimeError. Eager norms do not need it.

    Returns:
        The two context managers that `torch.utils.checkpoint.checkpoint` expects.

    Examples:
        >>> from torch.utils.checkpoint import checkpoint
        >>> def block(x):
        ...     return checkpoint(torch.tanh, x, use_reentrant=False, context_fn=keep_statistics)
        >>> block(torch.zeros(1))  # or torch.compile(block)
        tensor([0.])
    """

    def policy(context: object, op: object, *args: Any, **kwargs: Any) -> bool:
        if op is not torch.ops.normkit.snapshot.default:
            return False
        if type(args[0][0]) is Tensor:  # nothing traces it: the checkpoint is eager
            raise RuntimeError("an eager checkpoint would move compiled norms twice; compile what calls checkpoint()")
        return True

    return create_selective_checkpoint_contexts(policy)
