"""Batch statistics on the GPU: moments, standardize, and its gradient."""

from typing import Any

import torch
from torch import Tensor

from normkit.kernels.triton import column_kernels
from normkit.kernels.triton.launch import cdiv, column_launch, sum_grid, sum_launch
from normkit.kernels.triton.rows import add_up, as_rows, contiguous, device_of, sum_buffer

kernel: Any = column_kernels  # type checkers take a launch for a plain call


def moments(x: Tensor, mask: Tensor | None = None, center: bool = False) -> tuple[Tensor, Tensor]:
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
        kernel.column_forward[(launch.programs, cdiv(channels, launch.block))](
            rows, flags(mask), *(None,) * 7, *shares, *(None,) * 3, n, channels, rows.stride(0), 0.0, CENTER=center,
            **launch.meta,
        )  # fmt: skip
        kernel.merge_moments[sum_grid(channels)](
            *shares, stat, count, launch.programs, channels, CENTER=center, **sum_launch(launch.programs, channels)
        )
    return stat, count


def standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, scale: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """As `reference.standardize`, in one launch."""
    rows, stat = as_rows(x), stat.contiguous()
    n, channels = rows.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if n == 0 or channels == 0:
        return y
    launch = column_launch(n, channels)
    scale, shift = (None if vector is None else vector.expand(channels).contiguous() for vector in (scale, shift))
    with device_of(rows, stat):
        kernel.column_forward[(launch.programs, cdiv(channels, launch.block))](
            rows, None, y, stat[0], stat[-1], scale, shift, *(None,) * 8, n, channels, rows.stride(0),
            eps, CENTER=center, **launch.meta,
        )  # fmt: skip
    return y


def standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None = None,
    mask: Tensor | None = None, removed: Tensor | None = None, sums: bool = True, real: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """As `reference.standardize_grad`; one launch computes dx and sums."""
    rows, dys = as_rows(x), as_rows(dy)
    (n, channels), real = rows.shape, real and mask is not None
    dx = None if removed is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    height = 4 if real else 2
    out = sum_buffer((height, channels), x) if sums else None
    if n == 0 or channels == 0:
        return dx, out
    launch = column_launch(n, channels)
    shares = x.new_empty((launch.programs, height * channels), dtype=torch.float32) if sums else None
    stat = stat.contiguous()
    with device_of(x):
        kernel.column_backward[(launch.programs, cdiv(channels, launch.block))](
            dys, rows, flags(mask), dx, stat[0] if center else None, stat[-1], contiguous(factor), None,
            contiguous(removed), shares, None, n, channels, dys.stride(0), rows.stride(0), eps, CENTER=center,
            REAL=real, **launch.meta,
        )  # fmt: skip
        if out is not None:
            add_up(shares, out)
    return dx, out


def flags(mask: Tensor | None) -> Tensor | None:
    """A mask as 0 and 1, one per row; no copy of a contiguous one."""
    return None if mask is None else mask.reshape(-1).contiguous().view(torch.uint8)
