"""Launch of kernels: tile, warps and number of programs from the shape; sums of the programs' shares.

A launch decides the order of every sum. It follows from the shape alone, so that the same shape gives the same bits.
"""

import contextlib
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 264  # two for each of the 132 multiprocessors of a large card: enough to keep memory busy


class Launch(NamedTuple):
    """Tiles of `tile` rows by `block` channels, warps, and programs along rows."""

    tile: int
    block: int
    warps: int
    programs: int

    @property
    def meta(self) -> dict[str, int]:
        """The keywords of a kernel call."""
        return {"TILE": self.tile, "BLOCK": self.block, "num_warps": self.warps}


def row_launch(rows: int, channels: int, *, backward: bool = False) -> Launch:
    """Launch for kernels of whole rows: small rows share a program, large ones get more warps."""
    block = power_of_2(channels)
    tile = max(1, min(16, 2048 // block))
    warps = min(16, max(1, tile * block // (256 if backward else 512)))
    tiles = cdiv(rows, tile)
    return Launch(tile, block, warps, min(tiles, PROGRAMS) if backward else tiles)


def column_launch(rows: int, channels: int) -> Launch:
    """Launch for kernels of columns: tiles of 2048 numbers, at most 128 channels wide."""
    block = min(power_of_2(channels), 128)
    tile = min(2048 // block, power_of_2(max(rows, 1)))
    along = cdiv(4 * PROGRAMS, cdiv(channels, block))
    return Launch(tile, block, 4, max(1, min(cdiv(rows, tile), along)))


def sum_launch(programs: int, channels: int) -> dict[str, int]:
    """Keywords of a kernel that adds up the shares of so many programs."""
    return {"TILE": min(power_of_2(programs), 64), "BLOCK": min(power_of_2(channels), 32), "num_warps": 4}


def sum_grid(channels: int) -> tuple[int]:
    """Programs of that kernel: at most 32 channels each."""
    return (cdiv(channels, min(power_of_2(channels), 32)),)


def cdiv(a: int, b: int) -> int:
    """Integer division `a / b`, rounded up; Triton's own has the type of a constant in a kernel."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()


# -- functions of kernels ----------------------------------------------------------------------------------------------


@triton.jit
def load_vector(P, channel, real, missing: tl.constexpr):
    """Load a vector over channels as float32; `missing` in all of them if P is None."""
    if P is None:
        vector = tl.full(channel.shape, missing, tl.float32)
    else:
        vector = tl.load(P + channel, mask=real, other=missing).to(tl.float32)
    return vector


@triton.jit
def total_of_shares(P, here, real, programs, stride, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the programs' shares of one sum for a block of channels, in a fixed order."""
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for start in range(0, programs, TILE):
        row = start + tl.arange(0, TILE)
        inside = (row < programs)[:, None] & real[None, :]
        total += tl.load(P + row[:, None] * stride + here[None, :], mask=inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def add_partials(P, OUT, MORE, MORE_OUT, programs, channels, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Add up the programs' shares P[i, c] in a fixed order: OUT[c]. MORE likewise, if given."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    if tl.program_id(1) == 0:
        total = total_of_shares(P, channel, real, programs, channels, TILE, BLOCK)
        tl.store(OUT + channel, total.to(OUT.dtype.element_ty), mask=real)
    elif MORE is not None:
        total = total_of_shares(MORE, channel, real, programs, channels, TILE, BLOCK)
        tl.store(MORE_OUT + channel, total.to(MORE_OUT.dtype.element_ty), mask=real)


# -- tensors -----------------------------------------------------------------------------------------------------------


def add_up(shares: Tensor | None, out: Tensor, more: Tensor | None = None, more_out: Tensor | None = None) -> Tensor:
    """Add up shares `[programs, n]` in a fixed order into `out`, `[n]`; `more` likewise."""
    assert shares is not None
    programs, channels = shares.shape
    jit(add_partials)[(*sum_grid(channels), 1 if more is None else 2)](
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


def jit(kernel: Any) -> Any:
    """The kernel; type checkers take its launch for a plain call."""
    return kernel


def device_of(x: Tensor, parameter: Tensor | None = None) -> contextlib.AbstractContextManager[Any]:
    """Context in which the device of `x` is current, as Triton launches on the current one."""
    if parameter is not None and parameter.device != x.device:
        raise RuntimeError(f"x is on {x.device}, the norm on {parameter.device}; move one of them")
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
