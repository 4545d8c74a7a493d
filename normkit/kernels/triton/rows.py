"""Per-token norms on the GPU: one launch forward, two backward."""

import contextlib
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.triton import row_kernels
from normkit.kernels.triton.launch import LONGEST, Launch, cdiv, column_launch, row_launch, sum_grid, sum_launch

kernel: Any = row_kernels  # type checkers take a launch for a plain call
KINDS = {"layer": 0, "rms": 1, "rms_plus_eps": 2, "scale": 3}


class Saved(NamedTuple):
    """Mean and factor of each row, for the backward pass: `[rows, groups]`, float32."""

    mean: Tensor
    inv: Tensor


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `reference.layer`."""
    return _norm(x, weight, bias, "layer", eps)


def rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, inside: bool = True) -> Tensor:
    """As `reference.rms`."""
    return _norm(x, weight, bias, "rms" if inside else "rms_plus_eps", eps)


def scale(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `reference.scale`."""
    return _norm(x, weight, bias, "scale", eps)


def group(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int) -> Tensor:
    """As `reference.group`."""
    return _norm(x, weight, bias, "layer", eps, groups)


def group_rms(x: Tensor, eps: float, groups: int) -> Tensor:
    """As `reference.group_rms`."""
    return _norm(x, None, None, "rms", eps, groups)


def _norm(x, weight, bias, kind: str, eps: float, groups: int = 1) -> Tensor:
    return RowNorm.apply(x, weight, bias, KINDS[kind], eps, groups)


class RowNorm(torch.autograd.Function):
    """A row norm. Differentiated twice, it uses plain operations."""

    @staticmethod
    def forward(ctx, x, weight, bias, kind, eps, groups):  # noqa: D102
        y, saved = forward(x, weight, bias, kind, eps, groups)
        ctx.save_for_backward(x, weight, bias, *saved)
        ctx.options = kind, eps, groups
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, weight, bias, mean, inv = ctx.saved_tensors
        wanted, (kind, eps, groups) = ctx.needs_input_grad[:3], ctx.options
        if torch.is_grad_enabled():  # it is differentiated twice
            op = functools.partial(_by_reference, kind=kind, eps=eps, groups=groups)
            return *reference.differentiable_grad(op, dy, x, weight, bias), None, None, None
        given = dy, x, weight, Saved(mean, inv), kind, eps, groups
        dtype = None if bias is None else bias.dtype
        return *backward(*given, wanted[1], wanted[2], dtype), None, None, None


def _by_reference(x, weight, bias, kind: int, eps: float, groups: int) -> Tensor:
    """The same norm by PyTorch's operations, which can be differentiated twice."""
    if kind == KINDS["layer"]:
        return reference.group(x, weight, bias, eps, groups) if groups > 1 else reference.layer(x, weight, bias, eps)
    if groups > 1:
        return reference.group_rms(x, eps, groups)
    if kind == KINDS["scale"]:
        return reference.scale(x, weight, bias, eps)
    return reference.rms(x, weight, bias, eps, inside=kind == KINDS["rms"])


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: int, eps: float, groups: int = 1,
    launch: Launch | None = None,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """Compute y and row statistics, in one launch."""
    rows, channels, width = _sizes(x, groups)
    flat = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    saved = Saved(*torch.empty(2, rows, groups, dtype=torch.float32, device=x.device).unbind(0))
    if rows == 0 or channels == 0:
        return y, saved
    weight = weight if weight is None or is_scalar(weight, channels) else weight.expand(channels)
    bias = None if bias is None else bias.expand(channels)
    launch = launch or row_launch(rows, width)
    body = kernel.row_forward if width <= LONGEST else kernel.long_forward
    with device_of(x, weight):
        body[(launch.programs, groups)](
            flat, contiguous(weight), contiguous(bias), y, *saved, rows, width, flat.stride(0), eps,
            KIND=kind, SCALAR=is_scalar(weight, channels), **launch.meta,
        )  # fmt: skip
    return y, saved


def backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, saved: Saved, kind: int, eps: float, groups: int,
    want_weight: bool, want_bias: bool, bias_dtype: torch.dtype | None = None, launch: Launch | None = None,
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
    launch = launch or (row_launch(rows, width, backward=True) if fits else column_launch(rows, channels))
    shares, empty = (launch.programs, channels), functools.partial(x.new_empty, dtype=torch.float32)
    biases = None if db is None else empty(shares)
    weights = None if dw is None else empty((launch.programs * groups, 1) if scalar and fits else shares)
    strides = dy.stride(0), flat.stride(0)
    with device_of(x):
        if fits:
            kernel.row_backward[(launch.programs, groups)](
                dy, flat, contiguous(weight), *saved, dx, weights, biases, rows, width, *strides, eps,
                KIND=kind, SCALAR=scalar, **launch.meta,
            )  # fmt: skip
        else:
            kernel.long_backward[(rows, groups)](
                dy, flat, contiguous(weight), *saved, dx, width, *strides, eps,
                KIND=kind, SCALAR=scalar, BLOCK=LONGEST // 2, num_warps=8,
            )  # fmt: skip
            if dw is not None or db is not None:
                kernel.row_sums[(launch.programs, cdiv(channels, launch.block))](
                    dy, flat, *saved, weights, biases, rows, width, groups, *strides,
                    CENTER=kind == KINDS["layer"], **launch.meta,
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
