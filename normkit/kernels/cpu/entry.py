"""Operations with C++ kernels: tensors float32 or bfloat16, vectors `[C]` float32."""

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.cpu.arguments import call

DTYPES = (torch.float32, torch.bfloat16)


def moments(x: Tensor, mask: Tensor | None, center: bool, groups: int = 0, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the real rows of `x`, and their number."""
    (n, channels), x = _sizes(x), _contiguous(x)
    stat, count = _vectors(x, 1 + center), x.new_empty((), dtype=torch.float32)
    call("column_forward", x=x, mask=_real(mask, n), stat=stat, count=count, n=n, channels=channels, groups=groups,
         eps=float(eps), center=center)  # fmt: skip
    return stat, count


def standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, scale: Tensor | None = None, shift: Tensor | None = None,
    groups: int = 0,
) -> Tensor:  # fmt: skip
    """Standardize with given statistics: see `reference.standardize`."""
    (n, channels), x = _sizes(x), _contiguous(x)
    y, scale, shift = torch.empty_like(x), _expanded(scale, channels), _expanded(shift, channels)
    call("standardize", x=x, y=y, stat=stat.contiguous(), weight=scale, bias=shift, n=n, channels=channels,
         groups=groups, eps=float(eps), center=center)  # fmt: skip
    return y


def multiply_add(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift`."""
    (n, channels), x = _sizes(x), _contiguous(x)
    y = torch.empty_like(x)
    call("column_forward", x=x, y=y, scale=scale, shift=shift, n=n, channels=channels)
    return y


def standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None = None,
    mask: Tensor | None = None, removed: Tensor | None = None, sums: bool = True, real: bool = False, groups: int = 0,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradient of standardizing with given statistics: see `reference.standardize_grad`."""
    (n, channels), dy, x = _sizes(x), _contiguous(dy), _contiguous(x)
    real = real and mask is not None
    out = _vectors(x, 4 if real else 2) if sums else None
    inv, dy_coefficient, taken = reference.gradient_vectors(stat, eps, factor, removed)
    dx = x_coefficient = constant = None
    if taken is not None:
        dx, x_coefficient, constant = torch.empty_like(x), taken[-1] * inv, taken[0]
    call("column_backward", dy=dy, x=x, mask=_real(mask, n), dx=dx, mean=stat[0] if center else None,
         dy_coefficient=dy_coefficient, x_coefficient=x_coefficient, constant=constant, sums=out, n=n,
         channels=channels, groups=groups, eps=float(eps), real=real)  # fmt: skip
    if out is not None:
        out[1::2] *= inv
    return dx, out


def divide(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, length: bool = False, center: bool = False
) -> Tensor:
    """Divide each row by its root mean square or `length`; with `center`, without its mean."""
    return Divide.apply(x, weight, bias, eps, length, center)  # type: ignore[return-value]


class Divide(torch.autograd.Function):
    """As `fused.Divide`, in one pass each way. Differentiated twice, it uses plain operations."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, length, center):  # noqa: D102
        ctx.save_for_backward(x, weight, bias)  # not a copy, which has no graph to differentiate twice
        ctx.eps, ctx.length, ctx.center = eps, length, center
        (n, channels), x = _sizes(x), _contiguous(x)
        y = torch.empty_like(x)
        call("row_forward", x=x, y=y, weight=_expanded(weight, channels), bias=_expanded(bias, channels), n=n,
             channels=channels, eps=float(eps), length=length, center=center)  # fmt: skip
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled() or not torch._C._has_storage(dy):  # vmap passes gradients without memory
            op = reference.scale if ctx.length else reference.layer if ctx.center else reference.rms
            with torch.enable_grad():
                grads = reference.differentiable_grad(lambda x, w, b: op(x, w, b, ctx.eps), dy, x, weight, bias)
            return *grads, None, None, None
        (n, channels), x = _sizes(x), _contiguous(x)
        dx, sums = torch.empty_like(x), _vectors(x, 2) if any(ctx.needs_input_grad[1:3]) else None
        call("row_backward", dy=_contiguous(dy), x=x, dx=dx, weight=_expanded(weight, channels), sums=sums, n=n,
             channels=channels, eps=float(ctx.eps), length=ctx.length, center=ctx.center)  # fmt: skip
        dweight = None if weight is None or sums is None else sums[1].sum_to_size(weight.shape).to(weight.dtype)
        return dx, dweight, None if bias is None or sums is None else sums[0].to(bias.dtype), None, None, None


def _contiguous(x: Tensor) -> Tensor:
    """The tensor, contiguous and with its signs resolved."""
    return x.resolve_neg().contiguous()


def _real(mask: Tensor | None, n: int) -> Tensor | None:
    if mask is not None and mask.numel() != n:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; it must have one element for each of {n} rows")
    return None if mask is None else mask.to(torch.bool).contiguous()


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _vectors(x: Tensor, *rows: int) -> Tensor:
    """Uninitialized vectors `[*rows, C]`."""
    return x.new_empty((*rows, x.shape[-1]), dtype=torch.float32)


def _expanded(parameter: Tensor | None, channels: int) -> Tensor | None:
    """A parameter as contiguous float32 `[C]`."""
    if parameter is None or (parameter.dtype is torch.float32 and parameter.shape == (channels,)):
        return parameter if parameter is None else parameter.contiguous()
    return parameter.detach().to(torch.float32).expand(channels).contiguous()
