"""Batch statistics on the GPU: moments, scale and shift, and the gradient.

Statistics of this batch: read x to sum; read x, write y; read dy, x to sum; read dy, x, write dx: 3 + 5 activations.
Statistics known in advance: each side sums and writes on one reading: 2 + 3 activations.
A row that the mask leaves out affects no statistic, even if it is NaN.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from normkit.kernels.triton.launch import (
    add_up,
    as_rows,
    cdiv,
    column_launch,
    device_of,
    jit,
    load_vector,
    sum_buffer,
    sum_grid,
    sum_launch,
)


@triton.jit
def factors(MEAN, VAR, W, B, channel, real, eps, CENTER: tl.constexpr):
    """Compute a and b of `y = x * a + b = W * (x - mean) / sqrt(var + eps) + B` for a block of channels."""
    a = load_vector(W, channel, real, 1.0) / tl.sqrt(load_vector(VAR, channel, real, 1.0) + eps)
    b = load_vector(B, channel, real, 0.0)
    if CENTER:
        b -= a * load_vector(MEAN, channel, real, 0.0)
    return a, b


@triton.jit
def column_forward(
    X, MASK, Y, MEAN, VAR, W, B, SUM, SQUARE, COUNT, FINITE, STEP, NEXT,
    rows, channels, x_stride, eps,
    CENTER: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute Y (if given) and this program's share of the moments (if SQUARE is given).

    SQUARE without SUM: sums of x^2. With SUM: mean and squared deviations of this program's rows, by Welford's method
    for each row of the tile, merged at the end (Chan, Golub and LeVeque). So one reading is enough, a large mean costs
    no digits, and threads do not wait for each other within the loop.

    For the rule that follows: FINITE, 1 if no sum of shares can overflow, and NEXT, one more than the counter STEP.
    The rule's programs must not read STEP while one of them moves it.
    """
    start, programs = tl.program_id(0), tl.num_programs(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    if Y is not None:
        a, b = factors(MEAN, VAR, W, B, channel, real, eps, CENTER)  # type: ignore[misc]
    square = tl.zeros([TILE, BLOCK], tl.float32)
    mean = tl.zeros([TILE, BLOCK], tl.float32)
    seen = tl.zeros([TILE], tl.float32)
    for tile in range(start, tl.cdiv(rows, TILE), programs):
        row = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & real[None, :]
        x = tl.load(X + row[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        if Y is not None:
            y = x * a[None, :] + b[None, :]
            tl.store(Y + row[:, None] * channels + channel[None, :], y.to(Y.dtype.element_ty), mask=inside)
        if SQUARE is not None:
            counted = row < rows
            if MASK is not None:
                counted = tl.load(MASK + row, mask=counted, other=0) != 0
            x = tl.where(counted[:, None], x, 0.0)
            seen += tl.where(counted, 1.0, 0.0)
            if SUM is not None:
                step = tl.where(counted[:, None], x - mean, 0.0)
                mean += step * (1.0 / tl.maximum(seen, 1.0))[:, None]
                square += step * (x - mean)
            else:
                square += x * x
    if SQUARE is not None:
        count = tl.sum(seen, 0)
        middle = tl.sum(mean * seen[:, None], 0) / tl.maximum(count, 1.0)
        if SUM is not None:
            off = mean - middle[None, :]
            square += off * off * seen[:, None]
            tl.store(SUM + start * channels + channel, middle, mask=real)
        total = tl.sum(square, 0)
        tl.store(SQUARE + start * channels + channel, total, mask=real)
        if tl.program_id(1) == 0:
            tl.store(COUNT + start, count)
        if FINITE is not None:
            finite = (total * programs < 1e38) & (tl.abs(middle) < 1e14)  # 1e14^2 times 2^31 rows: 2e37
            tl.store(FINITE + start * tl.num_programs(1) + tl.program_id(1), tl.min(tl.where(finite, 1.0, 0.0), 0))
            if start + tl.program_id(1) == 0:
                tl.store(NEXT, tl.load(STEP) + 1)


@triton.jit
def merged_moments(
    SUM, SQUARE, COUNT, channel, programs, channels,
    CENTER: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the programs' shares in a fixed order: mean (0 without CENTER), moment, count."""
    real = channel < channels
    counts = tl.zeros([TILE], tl.float32)
    first = tl.zeros([TILE, BLOCK], tl.float32)
    second = tl.zeros([TILE, BLOCK], tl.float32)
    for start in range(0, programs, TILE):
        row = start + tl.arange(0, TILE)
        inside = (row < programs)[:, None] & real[None, :]
        n = tl.load(COUNT + row, mask=row < programs, other=0.0)
        counts += n
        second += tl.load(SQUARE + row[:, None] * channels + channel[None, :], mask=inside, other=0.0)
        if CENTER:
            first += n[:, None] * tl.load(SUM + row[:, None] * channels + channel[None, :], mask=inside, other=0.0)
    total = tl.sum(counts, 0)
    least = tl.maximum(total, 1.0)
    mean = tl.sum(first, 0) / least
    if CENTER:
        for start in range(0, programs, TILE):
            row = start + tl.arange(0, TILE)
            inside = (row < programs)[:, None] & real[None, :]
            n = tl.load(COUNT + row, mask=row < programs, other=0.0)
            off = tl.load(SUM + row[:, None] * channels + channel[None, :], mask=inside, other=0.0) - mean[None, :]
            second += n[:, None] * off * off
    return mean, tl.sum(second, 0) / least, total


@triton.jit
def merge_moments(
    SUM, SQUARE, COUNT, STAT, TOTAL, programs, channels,
    CENTER: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Merge the programs' shares into STAT `[k, C]` and the count of rows."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mean, second, total = merged_moments(  # type: ignore[misc]
        SUM, SQUARE, COUNT, channel, programs, channels, CENTER, TILE, BLOCK
    )  # fmt: skip
    if CENTER:
        tl.store(STAT + channel, mean, mask=channel < channels)
        tl.store(STAT + channels + channel, second, mask=channel < channels)
    else:
        tl.store(STAT + channel, second, mask=channel < channels)
    if tl.program_id(0) == 0:
        tl.store(TOTAL, total)


@triton.jit
def column_backward(
    DY, X, MASK, DX, MEAN, VAR, FACTOR, REMOVED, SUMS, FINITE,
    rows, channels, dy_stride, x_stride, eps,
    CENTER: tl.constexpr, REAL: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute DX (if given) and this program's share of the sums (if SUMS is given).

    The sums are those of dy and of dy * z.

    `dx = 1 / sqrt(var + eps) * (FACTOR * dy - s0 - z * s1)` with REMOVED `[k, C]`, s0 and s1; nothing is removed from
    rows of padding. With REAL, SUMS also has the sums over real rows: `[programs, 4, C]` instead of `[programs, 2, C]`.
    FINITE, for the rule that follows: 1 if no sum of shares can overflow.
    """
    start, programs = tl.program_id(0), tl.num_programs(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    inv = 1.0 / tl.sqrt(load_vector(VAR, channel, real, 1.0) + eps)
    mean = load_vector(MEAN, channel, real, 0.0)
    factor = load_vector(FACTOR, channel, real, 1.0)
    if DX is not None:
        direct = inv * factor
        s0, last = tl.zeros_like(inv), channel
        if CENTER:
            s0 = inv * load_vector(REMOVED, channel, real, 0.0)
            last += channels
        s1 = inv * load_vector(REMOVED, last, real, 0.0)
    total = tl.zeros([TILE, BLOCK], tl.float32)
    dot = tl.zeros([TILE, BLOCK], tl.float32)
    real_total = tl.zeros([TILE, BLOCK], tl.float32)
    real_dot = tl.zeros([TILE, BLOCK], tl.float32)
    for tile in range(start, tl.cdiv(rows, TILE), programs):
        row = tl.cast(tile, tl.int64) * TILE + tl.arange(0, TILE)
        inside = (row < rows)[:, None] & real[None, :]
        dy = tl.load(DY + row[:, None] * dy_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(X + row[:, None] * x_stride + channel[None, :], mask=inside, other=0.0).to(tl.float32)
        z = tl.where(inside, (x - mean[None, :]) * inv[None, :], 0.0)
        keep = inside
        if MASK is not None:
            keep = inside & (tl.load(MASK + row, mask=row < rows, other=0) != 0)[:, None]
        if SUMS is not None:
            total += dy
            dot += dy * z
            if REAL:
                real_total += tl.where(keep, dy, 0.0)
                real_dot += tl.where(keep, dy * z, 0.0)
        if DX is not None:
            dx = dy * direct[None, :] - tl.where(keep, z * s1[None, :] + s0[None, :], 0.0)
            tl.store(DX + row[:, None] * channels + channel[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    if SUMS is not None:
        here = SUMS + start * channels * (4 if REAL else 2) + channel
        tl.store(here, tl.sum(total, 0), mask=real)
        tl.store(here + channels, tl.sum(dot, 0), mask=real)
        if REAL:
            total, dot = real_total, real_dot
            tl.store(here + 2 * channels, tl.sum(total, 0), mask=real)
            tl.store(here + 3 * channels, tl.sum(dot, 0), mask=real)
        if FINITE is not None:
            finite = tl.abs(tl.sum(dot, 0) * factor) * programs < 1e38
            if CENTER:
                finite = finite & (tl.abs(tl.sum(total, 0) * factor) * programs < 1e38)
            tl.store(FINITE + start * tl.num_programs(1) + tl.program_id(1), tl.min(tl.where(finite, 1.0, 0.0), 0))


# -- launches ----------------------------------------------------------------------------------------------------------


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.moments`, in two launches; `x` has its own type, the results are float32."""
    rows = as_rows(x)
    n, channels = rows.shape
    stat, count = sum_buffer((1 + center, channels), x), sum_buffer((), x)
    if n == 0 or channels == 0:
        return stat, count
    launch = column_launch(n, channels)
    sizes = (channels * center, channels, 1)  # the programs' means, second moments and counts
    shares = [x.new_empty((launch.programs, size), dtype=torch.float32) if size else None for size in sizes]
    with device_of(rows):
        jit(column_forward)[(launch.programs, cdiv(channels, launch.block))](
            rows, flags(mask), *(None,) * 5, *shares, *(None,) * 3, n, channels, rows.stride(0), 0.0, CENTER=center,
            **launch.meta,
        )  # fmt: skip
        jit(merge_moments)[sum_grid(channels)](
            *shares, stat, count, launch.programs, channels, CENTER=center, **sum_launch(launch.programs, channels)
        )
    return stat, count


def standardize(x: Tensor, stat: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `reference.standardize`, in one launch."""
    rows, center = as_rows(x), len(stat) == 2
    n, channels = rows.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n == 0 or channels == 0:
        return y
    launch = column_launch(n, channels)
    stat = stat.expand(len(stat), channels).contiguous()
    affine = [None if t is None else t.expand(channels).contiguous() for t in (weight, bias)]
    with device_of(rows, stat):
        jit(column_forward)[(launch.programs, cdiv(channels, launch.block))](
            rows, None, y, stat[0] if center else None, stat[-1], *affine, *(None,) * 6, n, channels, rows.stride(0),
            eps, CENTER=center, **launch.meta,
        )  # fmt: skip
    return y


def gradient_sums(
    dy: Tensor, x: Tensor, mean: Tensor | None, mask: Tensor | None = None, real: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """As `reference.gradient_sums`, in two launches."""
    rows, dys = as_rows(x), as_rows(dy)
    (n, channels), real = rows.shape, real and mask is not None
    height = 4 if real else 2
    out = sum_buffer((height, channels), x)
    if n == 0 or channels == 0:
        return out
    launch = column_launch(n, channels)
    shares = x.new_empty((launch.programs, height * channels), dtype=torch.float32)
    with device_of(x):
        jit(column_backward)[(launch.programs, cdiv(channels, launch.block))](
            dys, rows, flags(mask), None, mean, *(None,) * 3, shares, None, n, channels, dys.stride(0), rows.stride(0),
            0.0, CENTER=mean is not None, REAL=real, **launch.meta,
        )  # fmt: skip
        return add_up(shares, out)


def gradient(dy: Tensor, x: Tensor, mean: Tensor | None, coefficients: Tensor, mask: Tensor | None = None) -> Tensor:
    """As `reference.gradient`, in one launch."""
    rows, dys = as_rows(x), as_rows(dy)
    n, channels = rows.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n == 0 or channels == 0:
        return dx
    launch = column_launch(n, channels)
    of_dy, of_x, constant = coefficients
    removed = -(of_x if mean is None else torch.stack([constant, of_x]))
    with device_of(x):
        jit(column_backward)[(launch.programs, cdiv(channels, launch.block))](
            dys, rows, flags(mask), dx, mean, None, of_dy, removed, None, None, n, channels, dys.stride(0),
            rows.stride(0), 0.0, CENTER=mean is not None, REAL=False, **launch.meta,
        )  # fmt: skip
    return dx


def flags(mask: Tensor | None) -> Tensor | None:
    """A mask as 0 and 1, one per row; no copy of a contiguous one."""
    return None if mask is None else mask.reshape(-1).contiguous().view(torch.uint8)
