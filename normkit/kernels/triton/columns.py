"""Batch statistics on the GPU: moments, standardize, and its gradient."""

from typing import Any

import torch
from torch import Tensor

from normkit.kernels.triton import column_kernels
from normkit.kernels.triton.launch import Launch, cdiv, column_launch, sum_grid, sum_launch
from normkit.kernels.triton.rows import add_up, as_rows, contiguous, device_of, group_rms, sum_buffer

kernel: Any = column_kernels  # type checkers take a launch for a plain call


def moments(x: Tensor, mask: Tensor | None = None, center: bool = False) -> tuple[Tensor, Tensor]:
    """As `reference.moments`, in two launches; `x` has its own type, the results are float32."""
    found = _forward(x, mask, None, None, (None,) * 4, center, 0.0, True, None)
    assert found is not None
    return found


def standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    output_scale: Tensor | None = None, output_shift: Tensor | None = None, mask: Tensor | None = None,
    sums: bool = False, launch: Launch | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """As `reference.standardize`; with `sums`, also the moments of x and the count."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    vectors = weight, bias, output_scale, output_shift
    return y, _forward(x, mask, y, stat, vectors, center, eps, sums, launch)


def infer(norm: Any, x: Tensor) -> Tensor:
    """A norm by its running statistics: one launch, and one of layer-scale."""
    x = group_rms(x, norm.eps, norm.groups) if norm.groups else x
    weight, bias = (None if p is None else p.expand(x.shape[-1]) for p in (norm.weight, norm.bias))
    return standardize(x, norm.running, norm.eps, norm.center, weight, bias)[0]


def standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None = None,
    dx_scale: Tensor | None = None, mask: Tensor | None = None, removed: Tensor | None = None, sums: bool = True,
    real: bool = False, launch: Launch | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """As `reference.standardize_grad`; one launch computes dx and sums."""
    rows, dys = as_rows(x), as_rows(dy)
    (n, channels), real = rows.shape, real and mask is not None
    dx = None if removed is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    height = 4 if real else 2
    out = sum_buffer((height, channels), x) if sums else None
    if n == 0 or channels == 0:
        return dx, out
    launch = launch or column_launch(n, channels)
    shares = x.new_empty((launch.programs, height * channels), dtype=torch.float32) if sums else None
    stat = stat.contiguous()
    with device_of(x):
        kernel.column_backward[(launch.programs, cdiv(channels, launch.block))](
            dys, rows, flags(mask), dx, stat[0], stat[-1], contiguous(factor), None, contiguous(dx_scale),
            contiguous(removed), shares, None, n, channels, dys.stride(0), rows.stride(0), eps, CENTER=center,
            REAL=real, **launch.meta,
        )  # fmt: skip
        if out is not None:
            add_up(shares, out)
    return dx, out


def flags(mask: Tensor | None) -> Tensor | None:
    """A mask as 0 and 1, one per row; no copy of a contiguous one."""
    return None if mask is None else mask.reshape(-1).contiguous().view(torch.uint8)


def _forward(
    x: Tensor, mask: Tensor | None, y: Tensor | None, stat: Tensor | None, vectors: tuple[Tensor | None, ...],
    center: bool, eps: float, sums: bool, launch: Launch | None,
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """One launch; two with `sums`, the moments of x and the count of rows."""
    rows = as_rows(x)
    n, channels = rows.shape
    launch = launch or column_launch(n, channels)
    fresh = (sum_buffer((1 + center, channels), x), sum_buffer((), x)) if sums else None
    if n == 0 or channels == 0:
        return fresh
    sizes = (channels * center, channels, 1) if sums else (0, 0, 0)  # the programs' means, second moments and counts
    shares = [x.new_empty((launch.programs, size), dtype=torch.float32) if size else None for size in sizes]
    mean, var = (None, None) if stat is None else (stat.contiguous()[0], stat.contiguous()[-1])
    with device_of(rows, var):
        kernel.column_forward[(launch.programs, cdiv(channels, launch.block))](
            rows, flags(mask), y, mean, var, *map(contiguous, vectors), *shares, None, None, None, n, channels,
            rows.stride(0), eps, CENTER=center, **launch.meta,
        )  # fmt: skip
        if fresh is not None:
            kernel.merge_moments[sum_grid(channels)](
                *shares, *fresh, launch.programs, channels, CENTER=center, **sum_launch(launch.programs, channels)
            )
    return fresh
