"""Eager arithmetic on a CPU in few passes over memory, by PyTorch's own fused kernels put to other uses.

A chain of elementwise operations reads and writes every number again and again. The kernels of batch and layer
normalization compute column moments, column sums and gradients in one pass each, that of weight normalization the
gradient of a row divided by its length; they take any factors for "statistics". `backend.borrows` says where they run:
elsewhere (CUDA, `torch.compile`, functional transforms) plain operations do.
"""

import functools

import torch
from torch import Tensor

from normkit.kernels import dispatch

_bn_backward = torch.ops.aten.native_batch_norm_backward
_ln_backward = torch.ops.aten.native_layer_norm_backward
_wn_backward = torch.ops.aten._weight_norm_interface_backward
BLOCK = 4096  # rows at a time: the kernels add up one row after another; more blocks, more starts of threads
HUGE = 1e18  # its square is a number yet
HALVES = (torch.bfloat16, torch.float16)


def worth(x: Tensor, weight: Tensor | None) -> bool:
    """Whether the analytic gradient of rows is wanted: `backend.borrows`, and there is something to differentiate."""
    needed = x.requires_grad or (weight is not None and weight.requires_grad)
    return needed and torch.is_grad_enabled() and dispatch.borrows(x)


def joins(x: Tensor, wide: torch.dtype) -> bool:
    """Whether the kernels read `x` beside vectors `[C]` of type `wide` without a copy: one type, or half and float."""
    return dispatch.borrows(x) and (x.dtype is wide or (x.dtype in HALVES and wide is torch.float32))


def where(mask: Tensor) -> Tensor:
    """Indices of the rows that `mask [...]` names. The host knows their number, which on a CPU is there to know.

    >>> where(torch.tensor([[True, False], [True, True]])).tolist()
    [0, 2, 3]
    """
    return mask.flatten().nonzero().squeeze(1)


def column_moments(rows: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and biased variance `[C]` of `rows [N, C]`, computed in `wide`.

    >>> [m.tolist() for m in column_moments(torch.tensor([[1.0], [3.0]]), torch.float32)]
    [[2.0], [1.0]]
    """
    mean = var = None
    if rows.dtype is not wide:  # only there to say the type; a momentum of 0 leaves it alone
        mean, var = torch.zeros(2, rows.shape[1], dtype=wide)
    blocks = rows.contiguous().split(BLOCK)
    found = [torch.batch_norm_update_stats(block, mean, var, 0.0) for block in blocks]
    if len(found) == 1:
        return found[0]
    means, variances = (torch.stack(each) for each in zip(*found, strict=True))
    share = torch.tensor([[len(block) / len(rows)] for block in blocks], dtype=wide)
    mean = (means * share).sum(0)
    return mean, ((variances + (means - mean).square()) * share).sum(0)


def standardize(
    x: Tensor, mean: Tensor | None, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`weight * (x - mean) / sqrt(var + eps) + bias` with vectors `[C]`, rounded once to the type of `x`.

    >>> standardize(torch.tensor([[3.0]]), torch.ones(1), torch.ones(1), None, torch.ones(1), 0.0).tolist()
    [[3.0]]
    """
    mean = constant(0.0, var) if mean is None else mean
    weight = constant(1.0, var) if weight is None else weight
    bias = constant(0.0, var) if bias is None else bias
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _shaped(torch.native_batch_norm(rows, weight, bias, mean, var, False, 0.0, eps)[0], x)


def column_sums(dy: Tensor, x: Tensor, mean: Tensor | None, inv: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over rows of `dy` and of `dy * (x - mean) * inv`, in one pass: `[C]` each.

    >>> dy, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    >>> [s.tolist() for s in column_sums(dy, x, None, torch.ones(1))]
    [[3.0], [11.0]]
    """
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
    """`dx = factor * inv * (dy - mean(dy) - z * mean(dy * z))`, and the sums of dy and of dy * z: `[C]` each.

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
    return torch.full((size,), value, dtype=dtype)


def constant(value: float, like: Tensor) -> Tensor:
    """A vector of one number, made once; nobody may write to it."""
    return _constant(value, like.shape[-1], like.dtype)


def scale_rows(x: Tensor, factor: Tensor) -> Tensor:
    """`x * factor` with a number for each row, rounded once to the type of `x`: rows are channels to this kernel.

    >>> scale_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[2.0], [3.0]])).tolist()
    [[2.0, 4.0], [9.0, 12.0]]
    """
    factor = factor.flatten()
    zero, one = torch.zeros_like(factor), torch.ones_like(factor)
    rows = x.reshape(1, -1, x.shape[-1]).contiguous()
    return _shaped(torch.native_batch_norm(rows, factor, zero, zero, one, False, 0.0, 0.0)[0], x)


def _shaped(y: Tensor, x: Tensor) -> Tensor:
    """In the shape of x, and no view: a layer after the norm may change it in place (`nn.ReLU(inplace=True)`)."""
    return torch.ops.aten._unsafe_view(y, x.shape)


def divide(x: Tensor, weight: Tensor | None, eps: float, *, length: bool = False) -> Tensor:
    """Each row divided by its root mean square (or `length`), times `weight`, with an analytic gradient.

    >>> divide(torch.tensor([[3.0, 4.0]]), None, 1e-5, length=True)
    tensor([[0.6000, 0.8000]])
    """
    return Divide.apply(x, weight, eps, length)  # type: ignore[return-value]


class Divide(torch.autograd.Function):
    """`weight * x * r(x)`, with `r = 1 / sqrt(mean(x^2) + eps)`, or `1 / max(||x||, eps)` where `length`.

    `weight` is None, one number, or `[C]` (not where `length`). Computed in float32 or wider, rounded once to the type
    of `x`. Backward, with `g = weight * dy`: `dx = r g - x r^2 sum(g x r) / C`; for a length not divided by C, and
    without the second term where it was clamped. Differentiated twice, it is the plain composition.
    """

    @staticmethod
    def forward(ctx, x, weight, eps, length):  # noqa: D102
        wide = torch.promote_types(x.dtype, torch.float32)
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
            return *differentiable(x, weight, ctx.eps, ctx.length, dy), None, None
        shape, width, kind = x.shape, x.shape[-1], x.dtype
        x, dy = (t.reshape(-1, width).to(r.dtype).contiguous() for t in (x, dy))
        r, given = r.view(-1, 1), None if weight is None else weight.to(r.dtype)
        if weight is not None and given is not None and weight.numel() > 1 and not ctx.length:
            mean = torch.zeros_like(r)
            dx, dweight, _ = _ln_backward(dy, x, (width,), mean, r, given, None, [True, True, False])
            dx.add_(r * (dy.mv(given) / width)[:, None])  # the kernel removes a mean that was not there
            return dx.to(kind).view(shape), dweight.to(weight.dtype), None, None
        # weight normalization is x * g / norm: its gradient is ours, with 1 / norm^2 for what multiplies sum(g x) x.
        # A clamped row is divided by a constant: a norm that makes the second term vanish, and a g that makes up for it
        scale = norm.view(-1, 1)
        scale = torch.where(scale < ctx.eps, HUGE, scale) if ctx.length else width**0.5 / r
        plain = r * scale
        dx, dots = _wn_backward(dy, x, plain if given is None else plain * given, scale, 0)
        dweight = None if weight is None else (dots * plain).sum().view(weight.shape).to(weight.dtype)
        return dx.to(kind).view(shape), dweight, None, None


def differentiable(x: Tensor, weight: Tensor | None, eps: float, length: bool, dy: Tensor) -> tuple:
    """Gradients of x and weight in `Divide` by plain operations, which can be differentiated again."""
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    if length:
        y = y / torch.linalg.vector_norm(y, dim=-1, keepdim=True).clamp(min=eps)
    else:
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    y = (y if weight is None else y * weight).to(x.dtype)
    wanted = [t for t in (x, weight) if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return tuple(next(grads) if t is not None and t.requires_grad else None for t in (x, weight))
