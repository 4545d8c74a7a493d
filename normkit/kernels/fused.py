"""Eager arithmetic on a CPU in few passes over memory, with PyTorch's own fused kernels.

A chain of elementwise operations reads and writes every number again and again. The kernels of batch and layer
normalization compute column moments, column sums and gradients in one pass each. That of weight normalization
computes the gradient of a row divided by its length. All of them accept any factors as statistics.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from normkit.kernels import reference

_bn_backward = torch.ops.aten.native_batch_norm_backward
_ln_backward = torch.ops.aten.native_layer_norm_backward
_wn_backward = torch.ops.aten._weight_norm_interface_backward
BLOCK = 4096  # rows at a time: the kernels add up one row after another; more blocks, more starts of threads
HUGE = 1e18  # its square is still finite


def moments(x: Tensor, mask: Tensor | None, center: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the real rows of `x`, and the number of these rows."""
    rows = x.reshape(-1, x.shape[-1])
    if mask is not None:  # a copy of the real rows costs less than plain operations on all of them
        rows = rows.index_select(0, _where(mask))
    count = rows.new_full((), rows.shape[0], dtype=dtype)
    if rows.shape[0] == 0:
        return rows.new_zeros(1 + center, rows.shape[1], dtype=dtype), count
    mean = var = None
    if rows.dtype is not dtype:  # running statistics only set the type; a momentum of 0 leaves them alone
        mean, var = rows.new_zeros(2, rows.shape[1], dtype=dtype)
    blocks = rows.contiguous().split(BLOCK)
    found = [torch.batch_norm_update_stats(block, mean, var, 0.0) for block in blocks]
    mean, var = found[0]
    if len(found) > 1:
        means, variances = (torch.stack(each) for each in zip(*found, strict=True))
        share = means.new_tensor([[len(block) / len(rows)] for block in blocks])
        mean = (means * share).sum(0)
        var = ((variances + (means - mean).square()) * share).sum(0)
    return torch.stack([mean, var]) if center else torch.addcmul(var, mean, mean)[None], count


def standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, scale: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """Standardize with given statistics: see `reference.standardize`."""
    scale, shift = (None if vector is None else vector.to(stat.dtype) for vector in (scale, shift))
    return normalize(x, stat[0] if center else None, stat[-1], scale, shift, eps)


def standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None = None,
    mask: Tensor | None = None, removed: Tensor | None = None, sums: bool = True, real: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradient of `standardize`: see `reference.standardize_grad`."""
    wide, rows, dys = stat.dtype, x.reshape(-1, x.shape[-1]), dy.reshape(-1, x.shape[-1])
    if dys.dtype is not rows.dtype:
        rows, dys = rows.to(wide), dys.to(wide)
    inv, dy_coefficient, taken = reference.gradient_vectors(stat, eps, factor, removed)
    mean = stat[0] if center else None
    dx = out = None
    if sums:
        out = torch.stack(column_sums(dys, rows, mean, inv))
        if real and mask is not None:
            kept = _where(mask)
            dy_real, x_real = dys.index_select(0, kept), rows.index_select(0, kept)
            out = torch.cat([out, torch.stack(column_sums(dy_real, x_real, mean, inv))])
    if dy_coefficient is not None and taken is not None:
        dx = normalize(rows, mean, stat[-1], taken[-1], taken[0] if center else None, eps)
        if mask is not None:
            dx = dx.index_fill_(0, _where(~mask), 0)
        if dx.dtype is wide:  # noqa: SIM108
            dx = dx.addcmul_(dys, dy_coefficient)
        else:  # halves on a CPU: two products rounded, then their sum, for a third of the time
            dx = multiply_add(dys, dy_coefficient, None).add_(dx)
        dx = dx.to(x.dtype).view(x.shape)
    return dx, out


def multiply_add(x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
    """`x * scale + shift` with vectors `[C]`, rounded once to the type of `x`."""
    return normalize(x, None, constant(1.0, scale), scale, shift, 0.0)


def normalize(
    x: Tensor, mean: Tensor | None, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`weight * (x - mean) / sqrt(var + eps) + bias` with vectors `[C]`, rounded once.

    >>> normalize(torch.tensor([[3.0]]), torch.ones(1), torch.ones(1), None, torch.ones(1), 0.0).tolist()
    [[3.0]]
    """
    mean = constant(0.0, var) if mean is None else mean
    weight = constant(1.0, var) if weight is None else weight
    bias = constant(0.0, var) if bias is None else bias
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _shaped(torch.native_batch_norm(rows, weight, bias, mean, var, False, 0.0, eps)[0], x)


def _where(mask: Tensor) -> Tensor:
    """Indices of the rows that `mask [...]` names; on a CPU their number needs no wait."""
    return mask.flatten().nonzero().squeeze(1)


def column_sums(dy: Tensor, x: Tensor, mean: Tensor | None, inv: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows `dy` and `dy * (x - mean) * inv`, in one pass: `[C]` each.

    >>> dy, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    >>> [s.tolist() for s in column_sums(dy, x, None, torch.ones(1))]
    [[3.0], [11.0]]
    """
    if not len(x):  # PyTorch's kernel fails with a floating-point exception
        return torch.zeros_like(inv), torch.zeros_like(inv)
    mean, one = constant(0.0, inv) if mean is None else mean, constant(1.0, inv)
    found = [
        _bn_backward(*block, one, None, None, mean, inv, True, 0.0, [False, True, True])[1:]
        for block in zip(dy.contiguous().split(BLOCK), x.contiguous().split(BLOCK), strict=True)
    ]
    scaled, plain = found[0] if len(found) == 1 else (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    return plain, scaled


def own_gradient(
    dy: Tensor, x: Tensor, mean: Tensor, inv: Tensor, factor: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Exact gradient of a batch, and the sums of dy and of dy * z: `[C]` each.

    `dx = factor * inv * (dy - mean(dy) - z * mean(dy * z))`.

    >>> dx, sums = own_gradient(torch.eye(2), torch.tensor([[1.0, 2.0], [3.0, 6.0]]), *torch.ones(3, 2))
    >>> [s.tolist() for s in sums]
    [[1.0, 1.0], [0.0, 5.0]]
    """
    factor = constant(1.0, inv) if factor is None else factor
    dys, rows = (t.reshape(-1, t.shape[-1]).contiguous() for t in (dy, x))
    dx, scaled, plain = _bn_backward(dys, rows, factor, None, None, mean, inv, True, 0.0, [True, True, True])
    return dx.view(x.shape), (plain, scaled)


@functools.lru_cache(64)
def _constant(value: float, size: int, dtype: torch.dtype) -> Tensor:
    with _disable_current_modes():  # a fake tensor would stay in the cache
        return torch.full((size,), value, dtype=dtype, device="cpu")


def constant(value: float, like: Tensor) -> Tensor:
    """A vector of one number, made once; must not be written to."""
    return _constant(value, like.shape[-1], like.dtype)


def scale_rows(x: Tensor, factor: Tensor) -> Tensor:
    """`x * factor` with a number for each row, rounded once to the type of `x`.

    >>> scale_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0], [3.0]])).tolist()
    [[2.0, 4.0], [9.0, 12.0]]
    """
    factor = factor.flatten()
    zero, one = torch.zeros_like(factor), torch.ones_like(factor)
    rows = x.reshape(1, -1, x.shape[-1]).contiguous()
    return _shaped(torch.native_batch_norm(rows, factor, zero, zero, one, False, 0.0, 0.0)[0], x)


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """Reshape to the shape of x, without a view: a later layer may change y in place."""
    return torch.ops.aten._unsafe_view(y, x.shape)


def divide(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, length: bool = False) -> Tensor:
    """Divide each row by its root mean square (or `length`), with an analytic gradient.

    >>> divide(torch.tensor([[3.0, 4.0]]), None, None, 1e-5, length=True)
    tensor([[0.6000, 0.8000]])
    """
    wide = reference.wide_type(x, weight)
    done = bias is None and wide is reference.wide_type(x)  # else more follows, and rounding comes after it
    y = Divide.apply(x if done else x.to(wide), weight, eps, length)
    return reference.affine(y, None, bias).to(x.dtype)  # type: ignore[arg-type]


class Divide(torch.autograd.Function):
    """`weight * x * r(x)` with an analytic gradient.

    `r = 1 / sqrt(mean(x^2) + eps)`, or `1 / max(||x||, eps)` with `length`. `weight` is None, one number, or `[C]`
    (not where `length`). Computed in float32 or wider, rounded once to the type of `x`. Backward, with
    `g = weight * dy`: `dx = r g - x r^2 sum(g x r) / C`; for a length not divided by C, and without the second term
    where it was clamped. Differentiated twice, it uses plain operations.
    """

    @staticmethod
    def forward(ctx, x, weight, eps, length):  # noqa: D102
        wide = reference.wide_type(x)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        r = norm.clamp(min=eps).reciprocal() if length else torch.rsqrt(norm.square() / x.shape[-1] + eps)
        ctx.eps, ctx.length = eps, length
        ctx.save_for_backward(x, weight, r, norm)
        given = None if weight is None else weight.to(wide)
        if given is not None and given.numel() > 1:
            return (x * r).mul_(given).to(x.dtype)
        r = r if given is None else r * given
        return x * r if x.dtype is wide else scale_rows(x, r)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, weight, r, norm = ctx.saved_tensors
        if torch.is_grad_enabled():
            op = reference.scale if ctx.length else reference.rms
            return *reference.differentiable_grad(lambda x, w: op(x, w, None, ctx.eps), dy, x, weight), None, None
        shape, width, kind = x.shape, x.shape[-1], x.dtype
        x, dy = (t.reshape(-1, width).to(r.dtype).contiguous() for t in (x, dy))
        r, given = r.view(-1, 1), None if weight is None else weight.to(r.dtype)
        if weight is not None and given is not None and weight.numel() > 1 and not ctx.length:
            mean = torch.zeros_like(r)
            dx, dweight, _ = _ln_backward(dy, x, (width,), mean, r, given, None, [True, True, False])
            dx.add_(r * (dy.mv(given) / width)[:, None])  # the kernel removes a mean that was not there
            return dx.to(kind).view(shape), dweight.to(weight.dtype), None, None
        # weight normalization is x * g / norm: it has this gradient, with 1 / norm^2 for what multiplies sum(g x) x.
        # A clamped row is divided by a constant: a norm that makes the second term vanish, and a g that makes up for it
        if ctx.length:
            scale = F.threshold(norm.view(-1, 1), ctx.eps, HUGE)
            plain = (r * scale).nan_to_num(1.0, torch.inf)  # 0 * inf where the sum of squares overflows: no gradient
        else:
            scale, plain = width**0.5 / r, torch.full_like(r, width**0.5)
        dx, dots = _wn_backward(dy, x, plain if given is None else plain * given, scale, 0)
        dweight = None if weight is None else (dots * plain).sum().view(weight.shape).to(weight.dtype)
        return dx.to(kind).view(shape), dweight, None, None
