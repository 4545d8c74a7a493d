"""Functions that several kernels call."""

import triton
import triton.language as tl


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
