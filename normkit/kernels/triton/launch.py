"""Launch of a kernel: tile, warps and number of programs from the shape.

A launch decides the order of every sum. It follows from the shape alone, so that the same shape gives the same bits.
"""

from typing import NamedTuple

LONGEST = 8192  # channels of a row that one program holds in registers (16384 spill); longer rows go by blocks
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
    block = min(power_of_2(channels), LONGEST)
    tile = max(1, min(16, 2048 // block)) if channels <= LONGEST else 1
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
    """Integer division `a / b`, rounded up."""
    return -(-a // b)


def power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
