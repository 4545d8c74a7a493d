"""Per-token norms on the GPU: one launch forward, two backward."""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.triton import row_kernels
from normkit.kernels.triton.launch import LONGEST, cdiv, column_launch, row_launch, sum_grid, sum_launch

kernel: Any = row_kernels  # type checkers take a launch for a plain call


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `reference.layer`."""
    return group(x, weight, bias, eps, 1)


def rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, inside: bool = True) -> Tensor:
    """As `reference.rms`."""
    op = functools.partial(reference.rms, eps=eps, inside=inside)
    return RowNorm.apply(x, weight, bias, "rms" if inside else "rms_plus_eps", eps, 1, op)  # type: ignore[return-value]


def scale(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `reference.scale`."""
    op = functools.partial(reference.scale, eps=eps)
    return RowNorm.apply(x, weight, bias, "scale", eps, 1, op)  # type: ignore[return-value]


def group(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int) -> Tensor:
    """As `reference.group`."""
    op = functools.partial(reference.group, eps=eps, groups=groups)
    return RowNorm.apply(x, weight, bias, "layer", eps, groups, op)  # type: ignore[return-value]


class RowNorm(torch.autograd.Function):
    """A row norm. Differentiated twice, it uses the plain `op(x, weight, bias)`."""

    @staticmethod
    def forward(ctx, x, weight, bias, kind, eps, groups, op):  # noqa: D102
        y, saved = forward(x, weight, bias, kind, eps, groups)
        ctx.save_for_backward(x, weight, bias, saved)
        ctx.kind, ctx.eps, ctx.groups, ctx.op = kind, eps, groups, op
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, weight, bias, saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is differentiated twice
            grads = reference.differentiable_grad(ctx.op, dy, x, weight, bias)
        else:
            _, want_weight, want_bias, *_ = ctx.needs_input_grad
            given = dy, x, weight, saved, ctx.kind, ctx.eps, ctx.groups
            grads = backward(*given, want_weight, want_bias, None if bias is None else bias.dtype)
        return *grads, None, None, None, None


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Compute y, and mean and factor of each row, `[2, rows, groups]`, in one launch."""
    rows, channels, width = _sizes(x, groups)
    flat = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    saved = torch.empty(2, rows, groups, dtype=torch.float32, device=x.device)
    if rows == 0 or channels == 0:
        return y, saved
    weight = weight if weight is None or is_scalar(weight, channels) else weight.expand(channels)
    bias = None if bias is None else bias.expand(channels)
    launch = row_launch(rows, width)
    body = kernel.row_forward if width <= LONGEST else kernel.long_forward
    with device_of(x, weight):
        body[(launch.programs, groups)](
            flat, contiguous(weight), contiguous(bias), y, *saved.unbind(0), rows, width, flat.stride(0), eps,
            KIND=kind, SCALAR=is_scalar(weight, channels), **launch.meta,
        )  # fmt: skip
    return y, saved


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, saved: Tensor, kind: str, eps: float, groups: int,
    want_weight: bool, want_bias: bool, bias_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias: one launch, and one for the parameters."""
    rows, channels, width = _sizes(x, groups)
    scalar = is_scalar(weight, channels)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = sum_buffer(weight.shape, x, weight.dtype) if weight is not None and want_weight else None
    db = sum_buffer((channels,), x, bias_dtype or x.dtype) if want_bias else None
    if rows == 0 or channels == 0:
        return dx, dw, db
    flat, dy = as_rows(x), as_rows(dy)
    fits = width <= LONGEST
    launch = row_launch(rows, width, backward=True) if fits else column_launch(rows, channels)
    shares, empty = (launch.programs, channels), functools.partial(x.new_empty, dtype=torch.float32)
    biases = None if db is None else empty(shares)
    weights = None if dw is None else empty((launch.programs * groups, 1) if scalar and fits else shares)
    strides = dy.stride(0), flat.stride(0)
    with device_of(x):
        if fits:
            kernel.row_backward[(launch.programs, groups)](
                dy, flat, contiguous(weight), *saved.unbind(0), dx, weights, biases, rows, width, *strides, eps,
                KIND=kind, SCALAR=scalar, **launch.meta,
            )  # fmt: skip
        else:
            kernel.long_backward[(rows, groups)](
                dy, flat, contiguous(weight), *saved.unbind(0), dx, width, *strides, eps,
                KIND=kind, SCALAR=scalar, BLOCK=LONGEST // 2, num_warps=8,
            )  # fmt: skip
            if dw is not None or db is not None:
                kernel.row_sums[(launch.programs, cdiv(channels, launch.block))](
                    dy, flat, *saved.unbind(0), weights, biases, rows, width, groups, *strides,
                    CENTER=kind == "layer", **launch.meta,
                )  # fmt: skip
        if dw is not None and not scalar:
            add_up(weights, dw, biases, db)
            return dx, dw, db
        if dw is not None and not fits:
            wide = torch.empty(channels, dtype=torch.float32, device=x.device)
            dw.copy_(add_up(weights, wide).sum())
        elif dw is not None:
            add_up(weights, dw)
        if db is not None:
            add_up(biases, db)
    return dx, dw, db


def add_up(shares: Tensor | None, out: Tensor, more: Tensor | None = None, more_out: Tensor | None = None) -> Tensor:
    """Add up shares `[programs, n]` in a fixed order into `out`, `[n]`; `more` likewise."""
    assert shares is not None
    programs, channels = shares.shape
    kernel.add_partials[(*sum_grid(channels), 1 if more is None else 2)](
        shares, out, more, more_out, programs, channels, **sum_launch(programs, channels)
    )
    return out


def sum_buffer(shape: tuple[int, ...], x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialized memory for sums over `x`; zeros (one more launch) if `x` is empty."""
    return (torch.empty if x.numel() else torch.zeros)(shape, dtype=dtype, device=x.device)


def as_rows(x: Tensor) -> Tensor:
    """`[..., C]` as rows of any stride with contiguous channels; a copy only if needed."""
    x = x.resolve_neg()
    rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(0, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def contiguous(parameter: Tensor | None) -> Tensor | None:
    """The tensor, contiguous; None stays None."""
    return None if parameter is None else parameter.contiguous()


def is_scalar(weight: Tensor | None, channels: int) -> bool:
    """True if there is one weight for all channels."""
    return weight is not None and weight.numel() == 1 and channels > 1


def device_of(x: Tensor, parameter: Tensor | None = None) -> contextlib.AbstractContextManager[Any]:
    """Context in which the device of `x` is current, as Triton launches on the current one."""
    if parameter is not None and parameter.device != x.device:
        raise RuntimeError(f"x is on {x.device}, the norm on {parameter.device}; move one of them")
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def _sizes(x: Tensor, groups: int) -> tuple[int, int, int]:
    channels = x.shape[-1]
    if channels % groups:
        raise ValueError(f"groups must divide the {channels} channels; got {groups}")
    return x.numel() // max(channels, 1), channels, channels // groups
