"""Eager arithmetic on a CPU in few passes over memory, by PyTorch's own fused kernels put to other uses.

A chain of elementwise operations reads and writes every number again and again. The kernels of batch and layer
normalization compute column moments, column sums, row sums and gradients in one pass each; they take any factors for
"statistics". `worth` says where they run: elsewhere (CUDA, `torch.compile`, functional transforms) plain operations do.
"""

import torch
from torch import Tensor, nn

_bn_backward = torch.ops.aten.native_batch_norm_backward
_ln_backward = torch.ops.aten.native_layer_norm_backward
BLOCK = 1024  # rows at a time: the kernels add up one row after another, and read a block twice from a cache
HALVES = (torch.bfloat16, torch.float16)


def here(x: Tensor) -> bool:
    """Whether `x` is one for these kernels: on a CPU, eager, not empty."""
    return (
        x.device.type == "cpu"
        and type(x) in (Tensor, nn.Parameter)
        and x.dtype.is_floating_point
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not torch._C._are_functorch_transforms_active()
    )


def worth(x: Tensor, weight: Tensor | None) -> bool:
    """Whether the analytic gradient of rows is wanted: `here`, and there is something to differentiate."""
    needed = x.requires_grad or (weight is not None and weight.requires_grad)
    return needed and torch.is_grad_enabled() and here(x)


def joins(x: Tensor, wide: torch.dtype) -> bool:
    """Whether the kernels read `x` beside vectors `[C]` of type `wide` without a copy: one type, or half and float."""
    return here(x) and (x.dtype is wide or (x.dtype in HALVES and wide is torch.float32))


def column_moments(rows: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """Mean and biased variance `[C]` of `rows [N, C]`, computed in `wide`.

    >>> [m.tolist() for m in column_moments(torch.tensor([[1.0], [3.0]]), torch.float32)]
    [[2.0], [1.0]]
    """
    zero = rows.new_zeros(rows.shape[1], dtype=wide)  # there to say the type; a momentum of 0 leaves it alone
    one, blocks = torch.ones_like(zero), rows.contiguous().split(BLOCK)
    found = [torch.batch_norm_update_stats(block, zero, one, 0.0) for block in blocks]
    if len(found) == 1:
        return found[0]
    means, variances = (torch.stack(each) for each in zip(*found, strict=True))
    share = torch.tensor([[len(block) / len(rows)] for block in blocks], dtype=wide)
    mean = (means * share).sum(0)
    return mean, ((variances + (means - mean).square()) * share).sum(0)


def multiply_add(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift` with vectors `[C]`, rounded once to the type of `x [N, C]`.

    >>> multiply_add(torch.ones(2, 1), torch.tensor([3.0]), torch.tensor([0.5])).tolist()
    [[3.5], [3.5]]
    """
    mean, var = torch.zeros_like(scale), torch.ones_like(scale)
    return torch.native_batch_norm(x.contiguous(), scale, shift, mean, var, False, 0.0, 0.0)[0]


def column_sums(dy: Tensor, x: Tensor, mean: Tensor | None, inv: Tensor) -> tuple[Tensor, Tensor]:
    """The sums over rows of `dy` and of `dy * (x - mean) * inv`, in one pass: `[C]` each.

    >>> dy, x = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    >>> [s.tolist() for s in column_sums(dy, x, None, torch.ones(1))]
    [[3.0], [11.0]]
    """
    mean, one = torch.zeros_like(inv) if mean is None else mean, torch.ones_like(inv)
    found = [
        _bn_backward(*block, one, None, None, mean, inv, True, 0.0, [False, True, True])[1:]
        for block in zip(dy.contiguous().split(BLOCK), x.contiguous().split(BLOCK), strict=True)
    ]
    scaled, plain = found[0] if len(found) == 1 else (torch.stack(each).sum(0) for each in zip(*found, strict=True))
    return plain, scaled


def row_dots(dy: Tensor, x: Tensor, inv: Tensor) -> Tensor:
    """`sum(dy * x * inv)` over the channels of each row of `x [N, C]`, with `inv [N, 1]`: `[N, 1]`.

    >>> row_dots(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), torch.ones(1, 1)).tolist()
    [[11.0]]
    """
    inv = inv.flatten()
    dy, x = dy.contiguous()[None], x.contiguous()[None]  # rows as channels, channels as positions
    mean = torch.zeros_like(inv)
    return _bn_backward(dy, x, None, None, None, mean, inv, True, 0.0, [False, True, False])[1][:, None]


def divide(x: Tensor, weight: Tensor | None, eps: float, *, length: bool = False) -> Tensor:
    """Each row divided by its root mean square (or `length`), times `weight`, with an analytic gradient.

    >>> divide(torch.tensor([[3.0, 4.0]]), None, 1e-5, length=True)
    tensor([[0.6000, 0.8000]])
    """
    return Divide.apply(x, None if weight is None else weight.to(x.dtype), eps, length)  # type: ignore[return-value]


class Divide(torch.autograd.Function):
    """`weight * x * r(x)`, with `r = 1 / sqrt(mean(x^2) + eps)`, or `1 / max(||x||, eps)` where `length`.

    `weight` is None, one number, or `[C]` (not where `length`). Backward, with `g = weight * dy`:
    `dx = r g - x r^2 sum(g x r) / C`; for a length not divided by C, and without the second term where it was clamped.
    Differentiated twice, it is the plain composition.
    """

    @staticmethod
    def forward(ctx, x, weight, eps, length):  # noqa: D102
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        r = norm.clamp(min=eps).reciprocal() if length else torch.rsqrt(norm.square() / x.shape[-1] + eps)
        ctx.eps, ctx.length = eps, length
        ctx.save_for_backward(x, weight, r, norm)
        if weight is None or weight.numel() == 1:
            return x * (r if weight is None else r * weight)
        return (x * r).mul_(weight)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, weight, r, norm = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_differentiable(x, weight, ctx.eps, ctx.length, dy), None, None
        shape, width = x.shape, x.shape[-1]
        x, dy, r = x.reshape(-1, width), dy.reshape(-1, width), r.view(-1, 1)
        if weight is not None and weight.numel() > 1 and not ctx.length:
            mean = torch.zeros_like(r)
            dx, dweight, _ = _ln_backward(
                dy.contiguous(), x.contiguous(), (width,), mean, r, weight, None, [True, True, False]
            )
            dx.add_(r * (dy.mv(weight) / width)[:, None])  # the kernel removes a mean that was not there
            return dx.view(shape), dweight, None, None
        dots = row_dots(dy, x, r)  # of the standardized row
        dweight = None if weight is None else dots.sum().view(weight.shape)
        part = torch.where(norm.view(-1, 1) < ctx.eps, 0, dots) if ctx.length else dots / width
        part = part * r.square()
        if weight is not None:
            r, part = r * weight, part * weight
        return (dy * r).addcmul_(x, part.neg_()).view(shape), dweight, None, None


def _differentiable(x: Tensor, weight: Tensor | None, eps: float, length: bool, dy: Tensor) -> tuple:
    if length:
        y = x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=eps)
    else:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    wanted = [t for t in (x, weight) if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return tuple(next(grads) if t is not None and t.requires_grad else None for t in (x, weight))
