"""Per-token norms on the GPU: one launch forward, two backward.

The grid of a kernel is (programs along rows, groups). Numbers are loaded once, computed in float32, stored in the type
of the pointer. Statistics of a row are saved as `[rows, groups]`: the mean, and `inv`, the factor of the row.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from normkit.kernels.triton.launch import (
    add_up,
    as_rows,
    contiguous,
    device_of,
    jit,
    load_vector,
    row_launch,
    sum_buffer,
)


@triton.jit
def inverse(square, width, eps, KIND: tl.constexpr):
    """The factor of a row from its sum of squares, from which "layer" has removed the mean."""
    if KIND == "rms_plus_eps":
        inv = 1.0 / (tl.sqrt(square / width) + eps)
    elif KIND == "scale":
        inv = 1.0 / tl.maximum(tl.sqrt(square), eps)
    else:
        inv = 1.0 / tl.sqrt(square / width + eps)
    return inv


@triton.jit
def share(dot, inv, width, eps, KIND: tl.constexpr):
    """Share of z to subtract from the gradient of a row, from `dot = sum(g * z)`."""
    if KIND == "rms_plus_eps":
        rest = 1.0 - eps * inv  # rms / (rms + eps); 0 for a row of zeros, whose z is 0 as finite
        part = tl.where(rest > 0, dot / width / tl.where(rest > 0, rest, 1.0), 0.0)
    elif KIND == "scale":
        part = tl.where(inv * eps < 1.0, dot, 0.0)  # a clamped length is a constant
    else:
        part = dot / width
    return part


@triton.jit
def load_weight(W, channel, real, SCALAR: tl.constexpr):
    """The weights of a run of channels: 1 without W, one number for all with SCALAR."""
    if SCALAR:
        w = tl.zeros(channel.shape, tl.float32) + tl.load(W).to(tl.float32)
    else:
        w = load_vector(W, channel, real, 1.0)
    return w


@triton.jit
def row_forward(
    X, W, B, Y, MEAN, INV, rows, width, x_stride, eps,
    KIND: tl.constexpr, SCALAR: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute Y = W * z + B of rows of X."""
    group, groups = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    column = tl.arange(0, BLOCK)
    channel = group * width + column
    inside = (row < rows)[:, None] & (column < width)[None, :]
    out = row[:, None] * (width * groups) + channel[None, :]
    x = tl.load(X + row[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    if KIND == "layer":
        mean = tl.sum(x, 1) / width
        x = tl.where(inside, x - mean[:, None], 0.0)
        tl.store(MEAN + row * groups + group, mean, mask=row < rows)
    inv = inverse(tl.sum(x * x, 1), width, eps, KIND)
    tl.store(INV + row * groups + group, inv, mask=row < rows)
    y = x * inv[:, None] * load_weight(W, channel, column < width, SCALAR)[None, :]
    if B is not None:
        y += load_vector(B, channel, column < width, 0.0)[None, :]
    tl.store(Y + out, y.to(Y.dtype.element_ty), mask=inside)


@triton.jit
def row_backward(
    DY, X, W, MEAN, INV, DX, DW, DB, rows, width, dy_stride, x_stride, eps,
    KIND: tl.constexpr, SCALAR: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute DX and this program's share of the sums over rows for W and B.

    A program takes every `programs`-th tile, in order, and writes its own row of DW and DB: sums without atomics.
    """
    start, programs = tl.program_id(0), tl.num_programs(0)
    group, groups = tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, BLOCK)
    channel = group * width + column
    real = column < width
    dw = tl.zeros([TILE, BLOCK], tl.float32)
    db = tl.zeros([TILE, BLOCK], tl.float32)
    w = load_weight(W, channel, real, SCALAR)[None, :]
    for tile in range(start, tl.cdiv(rows, TILE), programs):
        row = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & real[None, :]
        dy = tl.load(DY + row[:, None] * dy_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        z = tl.load(X + row[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        inv = tl.load(INV + row * groups + group, mask=row < rows, other=0.0)
        if KIND == "layer":
            mean = tl.load(MEAN + row * groups + group, mask=row < rows, other=0.0)
            z = tl.where(inside, z - mean[:, None], 0.0)
        z = z * inv[:, None]
        if DW is not None:
            dw += dy * z
        if DB is not None:
            db += dy
        g = dy * w
        part = share(tl.sum(g * z, 1), inv, width, eps, KIND)
        dx = g - z * part[:, None]
        if KIND == "layer":
            dx = dx - (tl.sum(g, 1) / width)[:, None]
        dx = dx * inv[:, None]
        out = row[:, None] * (width * groups) + channel[None, :]
        tl.store(DX + out, dx.to(DX.dtype.element_ty), mask=inside)
    if DW is not None:
        if SCALAR:
            tl.store(DW + start * groups + group, tl.sum(tl.sum(dw, 0), 0))
        else:
            tl.store(DW + start * width * groups + channel, tl.sum(dw, 0), mask=real)
    if DB is not None:
        tl.store(DB + start * width * groups + channel, tl.sum(db, 0), mask=real)


# -- launches ----------------------------------------------------------------------------------------------------------


def row_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """As `reference.row_norm`; also return mean and factor of each row, `[2, rows, groups]`."""
    rows, channels, width = _sizes(x, groups)
    flat = as_rows(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    saved = torch.empty(2, rows, groups, dtype=torch.float32, device=x.device)
    if rows == 0 or channels == 0:
        return y, saved
    weight = weight if weight is None or is_scalar(weight, channels) else weight.expand(channels)
    bias = None if bias is None else bias.expand(channels)
    launch = row_launch(rows, width)
    with device_of(x, weight):
        jit(row_forward)[(launch.programs, groups)](
            flat, contiguous(weight), contiguous(bias), y, *saved.unbind(0), rows, width, flat.stride(0), eps,
            KIND=kind, SCALAR=is_scalar(weight, channels), **launch.meta,
        )  # fmt: skip
    return y, saved


def row_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, saved: Tensor, kind: str, eps: float,
    groups: int, wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias: one launch, and one for the parameters."""
    rows, channels, width = _sizes(x, groups)
    scalar = is_scalar(weight, channels)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = sum_buffer(weight.shape, x, weight.dtype) if weight is not None and wanted[0] else None
    db = sum_buffer((channels,), x, bias.dtype) if bias is not None and wanted[1] else None
    if rows == 0 or channels == 0:
        return dx, dw, db
    flat, dy = as_rows(x), as_rows(dy)
    launch = row_launch(rows, width, backward=True)
    empty = functools.partial(x.new_empty, dtype=torch.float32)
    biases = None if db is None else empty((launch.programs, channels))
    weights = None if dw is None else empty((launch.programs * groups, 1) if scalar else (launch.programs, channels))
    with device_of(x):
        jit(row_backward)[(launch.programs, groups)](
            dy, flat, contiguous(weight), *saved.unbind(0), dx, weights, biases, rows, width, dy.stride(0),
            flat.stride(0), eps, KIND=kind, SCALAR=scalar, **launch.meta,
        )  # fmt: skip
        if dw is not None and not scalar:
            add_up(weights, dw, biases, db)
            return dx, dw, db
        for share, total in ((weights, dw), (biases, db)):
            if total is not None:
                add_up(share, total)
    return dx, dw, db


def is_scalar(weight: Tensor | None, channels: int) -> bool:
    """True if there is one weight for all channels."""
    return weight is not None and weight.numel() == 1 and channels > 1


def _sizes(x: Tensor, groups: int) -> tuple[int, int, int]:
    channels = x.shape[-1]
    if channels % groups:
        raise ValueError(f"groups must divide the {channels} channels; got {groups}")
    return x.numel() // max(channels, 1), channels, channels // groups
