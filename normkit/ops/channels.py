"""Per-channel arithmetic over all real rows of `x[..., C]`: moments, standardize, its gradient, the all-reduce.

`k` rows of statistics describe a batch: `[2, C]` (mean, variance) where the mean is removed, else `[1, C]` (quadratic
mean). What the statistics *are* is the business of `normkit.norms`; nothing here knows a method's name.
"""

import functools
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.ops import backend, fused


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the real rows of `x`, and how many rows there are.

    `x` is `[..., C]`; `dtype` is the type to compute in, x's own where None; `mask` is `[...]`, True where a row is
    real. Without a real row the statistics are zero.

    >>> moments(torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([True, True, False]), center=True)
    (tensor([[2.],
            [1.]]), tensor(2.))
    """
    dtype = x.dtype if dtype is None else dtype
    if dtype is torch.float32 and backend.triton(x, "moments"):
        return backend.load().moments(x, mask, center)
    rows = x.reshape(-1, x.shape[-1])
    fast = mask is None and fused.joins(x, dtype)
    rows = rows if fast else rows.to(dtype)
    if mask is None:
        count = rows.new_full((), rows.shape[0], dtype=dtype)
        if rows.shape[0] == 0:
            return rows.new_zeros(1 + center, rows.shape[1]), count
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
    center: bool
    sync: bool
    pad_grad: str

    def take_gradient(self, batch: Tensor, count: Tensor, step: Tensor, memo: tuple[Tensor, ...]) -> Tensor:
        """Gradient statistics `[k, C]` to remove, given this batch's; the owner updates its state."""
        ...


class Standardize(torch.autograd.Function):
    """`y = weight * (post * z + shift) + bias` with `z = (x - mean) / sqrt(var + eps)`, the statistics given.

    The backward pass removes the gradient statistics that `rule` chooses (`s0` of `g`, `s1` of `g * z`):
    `dx = back * (g - s0 - z * s1) / sqrt(var + eps)` with `g = gain * post * weight * dy`. Rows of padding take part
    in `dweight` and `dbias`; they never move a statistic, so nothing is removed from their gradient.
    """

    @staticmethod
    def forward(ctx, rule, x, weight, bias, mask, stat, count, step, post, shift, gain, back, *memo):  # noqa: D102
        ctx.rule, ctx.has_bias = rule, bias is not None
        ctx.save_for_backward(x, weight, mask, stat, count, step, post, shift, gain, back, *memo)
        if stat.dtype is torch.float32 and backend.triton(x, "standardize"):
            return backend.load().standardize(x, stat, rule.eps, rule.center, weight, bias, post, shift)[0]
        inv = torch.rsqrt(stat[-1] + rule.eps)
        a = inv if post is None else inv * post
        b = 0.0 if shift is None else shift
        if rule.center:
            b = b - stat[0] * a
        if weight is not None:
            a, b = a * weight, b * weight
        if bias is not None:
            b = b + bias
        return multiply_add(x, a, b if isinstance(b, Tensor) else torch.zeros_like(a))

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, weight, mask, stat, count, step, post, shift, gain, back, *memo = ctx.saved_tensors
        rule, shape, dtype = ctx.rule, x.shape, x.dtype
        grad = None
        if stat.dtype is torch.float32 and backend.triton(x, "standardize_grad"):
            kernel = backend.load().standardize_grad
            grad = functools.partial(kernel, dy, x, stat, rule.eps, rule.center)
        real = mask is not None and rule.pad_grad == "real"
        inv = torch.rsqrt(stat[-1] + rule.eps)
        mean = stat[0] if rule.center else None  # z = (x - mean) * inv is never written out: both join [C] factors
        keep = None if mask is None else mask.reshape(-1, 1)
        if grad is not None:
            sums = grad(mask=mask, real=real)[1]
        else:
            x, dy = (t.reshape(-1, t.shape[-1]) for t in (x, dy))
            if not fused.joins(x, stat.dtype) or not fused.joins(dy, stat.dtype) or x.dtype is not dy.dtype:
                x, dy = x.to(stat.dtype), dy.to(stat.dtype)
            sums = _sums(dy, x, mean, inv)
            if keep is not None and real:
                sums = torch.cat([sums, _sums(torch.where(keep, dy, 0), x, mean, inv)])
        sums, felt = sums[:2], sums[-2:]  # of all rows for the parameters, and those that move statistics
        dbias, dweight = sums
        if post is not None:
            dweight = dweight * post
        if shift is not None:
            dweight = dweight + shift * dbias
        if gain is not None:
            dweight = dweight * gain
        factor = inv.new_ones(()) if weight is None else weight.to(stat.dtype)
        for constant in (post, gain):
            factor = factor if constant is None else factor * constant

        sums = (felt if rule.center else felt[1:]) * factor
        if rule.sync:
            sums = all_reduce(sums)
        s = rule.take_gradient(sums / count.clamp(min=1), count, step, tuple(memo))

        if grad is not None:
            dx = grad(factor if factor.dim() else None, back, mask, s, sums=False)[0]
        else:
            scale = inv if back is None else inv * back
            slope, slant = -scale * inv * s[-1], (factor * scale).expand_as(inv)
            level = torch.zeros_like(slope) if mean is None else -scale * s[0] - slope * mean
            dx = multiply_add(x, slope, level)
            dx = dx if keep is None else torch.where(keep, dx, 0)
            if dx.dtype is stat.dtype:
                dx = dx.addcmul_(dy, slant)
            else:  # halves on a CPU: two products rounded, then their sum, for a third of the time
                dx = multiply_add(dy, slant, torch.zeros_like(slant)).add_(dx)
            dx = dx.to(dtype).view(shape)
        dweight = None if weight is None else dweight.to(weight.dtype)
        dbias = dbias.to(dtype if weight is None else weight.dtype) if ctx.has_bias else None
        return None, dx, dweight, dbias, *[None] * (8 + len(memo))


def multiply_add(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift` with vectors `[C]` of a type to compute in; in the type of `x`.

    >>> multiply_add(torch.ones(2, 1), torch.tensor([3.0]), torch.tensor([0.5])).tolist()
    [[3.5], [3.5]]
    """
    if fused.joins(x, scale.dtype) and not torch.is_grad_enabled():
        return fused.multiply_add(x.reshape(-1, x.shape[-1]), scale, shift.to(scale.dtype)).view(x.shape)
    if x.dtype == scale.dtype:  # no casts in an exported graph
        return torch.addcmul(shift, x, scale)
    wide = torch.promote_types(x.dtype, scale.dtype)
    return torch.addcmul(shift.to(wide), x.to(wide), scale.to(wide)).to(x.dtype)


def _sums(dy: Tensor, x: Tensor, mean: Tensor | None, inv: Tensor) -> Tensor:
    """The sums over rows of `dy` and of `dy * z`, `[2, C]`."""
    if fused.joins(x, inv.dtype):
        return torch.stack(fused.column_sums(dy, x, mean, inv))
    return torch.stack([dy.sum(0), (dy * (x if mean is None else x - mean)).sum(0) * inv])


@torch.library.custom_op("normkit::snapshot", mutates_args=())
def snapshot(tensors: list[Tensor]) -> list[Tensor]:
    """Copies that a compiled backward must keep instead of recomputing them.

    A compiled graph would otherwise recompute small tensors in the backward pass from the buffers that they were
    made of, which the forward pass has overwritten by then (seen with torch 2.13: window slots off by one).
    """
    return [t.clone() for t in tensors]


@snapshot.register_fake
def _(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]
