"""Batch statistics on the GPU: moments, standardize with statistics that are given, and its gradient."""

from typing import Any

import torch
from torch import Tensor

from normkit.kernels.triton import channel_kernels
from normkit.kernels.triton.launch import Launch, cdiv, column_launch, power_of_2
from normkit.kernels.triton.rows import as_rows, blank, finish, on, partial, whole

kernel: Any = channel_kernels  # a checker takes a launch for a plain call


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """As `ops.channels.moments`, of `x` in its own type: `[k, C]` and the count of rows, float32. Two launches.

    `mask` may also be numbers `[...]`, the weight of each row.
    """
    if torch.compiler.is_compiling():
        return column_moments(x, mask, center)
    rows, stat, room, launch = _room(x, center, launch)
    assert stat is not None
    count = _forward(rows, mask, None, None, None, None, None, None, center, 0.0, room, launch, stat)
    return stat, count


def standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, weight: Tensor | None = None, bias: Tensor | None = None,
    output_scale: Tensor | None = None, shift: Tensor | None = None, mask: Tensor | None = None, sums: bool = False,
    launch: Launch | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """`weight * (post * z + shift) + bias`; with `sums`, the moments of x from the same reading (stale statistics)."""
    if torch.compiler.is_compiling() and not sums:
        return column_standardize(x, stat, eps, center, weight, bias, output_scale, shift), None
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, fresh, room, launch = _room(x, center, launch, sums)
    count = _forward(rows, mask, y, stat, weight, bias, output_scale, shift, center, eps, room, launch, fresh)
    return y, None if fresh is None else (fresh, count)


def standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None = None,
    dx_scale: Tensor | None = None, mask: Tensor | None = None, removed: Tensor | None = None, sums: bool = True,
    real: bool = False, launch: Launch | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx where `removed`, the gradient statistics `[k, C]`, is given; with `sums`, sums of dy and dy * z, `[2, C]`.

    `factor` is what multiplies dy on its way to z (weight, post, gain). With `real` the sums are `[4, C]`: over all
    rows, then over real ones. Both in one pass where the gradient statistics are stale, else one call for each.
    """
    if torch.compiler.is_compiling():
        found = column_standardize_grad(dy, x, stat, eps, center, factor, dx_scale, mask, removed, sums, real)
        return (None if removed is None else found[0]), (found[1] if sums else None)
    rows, dys = as_rows(x), as_rows(dy)
    (n, channels), real = rows.shape, real and mask is not None
    dx = None if removed is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    height = 4 if real else 2
    out = blank((height, channels), x) if sums else None
    if n == 0 or channels == 0:
        return dx, out
    launch = launch or column_launch(n, channels)
    room = partial((launch.programs, height * channels), x) if sums else None
    stat = stat.contiguous()
    with on(x):
        kernel.column_backward[(launch.programs, cdiv(channels, launch.block))](
            dys, rows, flags(mask), dx, stat[0], stat[-1], whole(factor), None, whole(dx_scale), whole(removed), room,
            None, n, channels, dys.stride(0), rows.stride(0), eps, CENTER=center, REAL=real, **launch.meta,
        )  # fmt: skip
        if out is not None:
            finish(room, out)
    return dx, out


def flags(mask: Tensor | None) -> Tensor | None:
    """A mask as numbers, one for each row, without a copy where it is boolean and contiguous."""
    if mask is None:
        return None
    mask = mask.reshape(-1)
    return (mask.view(torch.uint8) if mask.dtype is torch.bool else mask).contiguous()


Room = tuple[Tensor | None, Tensor | None, Tensor | None]


def _room(x: Tensor, center: bool, launch: Launch | None, sums: bool = True):
    rows = as_rows(x)
    n, channels = rows.shape
    launch = launch or column_launch(n, channels)
    if not sums:
        return rows, None, (None, None, None), launch
    stat = blank((1 + center, channels), x)
    size = launch.programs, channels
    room = partial(size, x) if center else None, partial(size, x), partial((launch.programs, 1), x)
    return rows, stat, room, launch


def _forward(
    rows, mask, y, stat, weight, bias, output_scale, shift, center, eps, room: Room, launch: Launch, fresh
) -> Tensor:
    """One launch, two with statistics to write into `fresh`; the count of rows."""
    n, channels = rows.shape
    count = blank((), rows)  # the second launch writes it; without statistics nobody asks
    if n == 0 or channels == 0:
        return count
    mean, var = (None, None) if stat is None else (stat.contiguous()[0], stat.contiguous()[-1])
    vectors = (whole(t) for t in (weight, bias, output_scale, shift))
    with on(rows):
        kernel.column_forward[(launch.programs, cdiv(channels, launch.block))](
            rows, flags(mask), y, mean, var, *vectors, *room, None, None, None, n, channels,
            rows.stride(0), eps, CENTER=center, **launch.meta,
        )  # fmt: skip
        if fresh is not None:
            block = min(power_of_2(channels), 32)
            tile = min(power_of_2(launch.programs), 64)
            kernel.merge_moments[(cdiv(channels, block),)](
                *room, fresh, count, launch.programs, channels, CENTER=center, TILE=tile, BLOCK=block, num_warps=4
            )
    return count


# -- the same as operators that a compiled graph can hold --------------------------------------------------------------


@torch.library.custom_op("normkit::column_moments", mutates_args=())
def column_moments(x: Tensor, mask: Tensor | None, center: bool) -> tuple[Tensor, Tensor]:
    """Operator: `moments`."""
    return moments(x, mask, center)


@column_moments.register_fake
def _(x, mask, center):
    return x.new_empty((1 + center, x.shape[-1]), dtype=torch.float32), x.new_empty((), dtype=torch.float32)


@torch.library.custom_op("normkit::column_standardize", mutates_args=())
def column_standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, weight: Tensor | None, bias: Tensor | None,
    output_scale: Tensor | None, shift: Tensor | None,
) -> Tensor:  # fmt: skip
    """Operator: `standardize` without sums. Its derivative belongs to the rule that chose the statistics."""
    return standardize(x, stat, eps, center, weight, bias, output_scale, shift)[0]


@column_standardize.register_fake
def _(x, stat, eps, center, weight, bias, output_scale, shift):
    return x.new_empty(x.shape)


@torch.library.custom_op("normkit::column_standardize_grad", mutates_args=())
def column_standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None, dx_scale: Tensor | None,
    mask: Tensor | None, removed: Tensor | None, sums: bool, real: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Operator: `standardize_grad`; empty where it returns None."""
    dx, out = standardize_grad(dy, x, stat, eps, center, factor, dx_scale, mask, removed, sums, real)
    return x.new_empty(0) if dx is None else dx, stat.new_empty(0) if out is None else out


@column_standardize_grad.register_fake
def _(dy, x, stat, eps, center, factor, dx_scale, mask, removed, sums, real):
    height = 4 if real and mask is not None else 2
    dx = x.new_empty(0) if removed is None else x.new_empty(x.shape)
    return dx, stat.new_empty((height, x.shape[-1]), dtype=torch.float32) if sums else stat.new_empty(0)
