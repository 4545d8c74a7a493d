"""Rules of methods in Triton, in the launch that adds up the programs' shares.

`train_rule` is `StatNorm.train_stat`, `grad_rule` is `grad_stat`, for the rules that a `KernelRule` describes. Each
program owns a block of channels and writes the buffers of these; program 0 alone reads and writes counters. Whether the
batch is usable depends on all channels: each program reads FINITE, which the column pass wrote for every share, a few
KB. Shares are summed in a fixed order, as everywhere. `window_excess` prepares the search for outliers.
"""

import triton
import triton.language as tl

from normkit.kernels.triton.columns import merged_moments
from normkit.kernels.triton.launch import load_vector, total_of_shares


@triton.jit
def usable(FINITE, shares, count, TILE: tl.constexpr):
    """1 if some row was real and no sum of shares can overflow, else 0."""
    least = tl.full([TILE], 1.0, tl.float32)
    for start in range(0, shares, TILE):
        i = start + tl.arange(0, TILE)
        least = tl.minimum(least, tl.load(FINITE + i, mask=i < shares, other=1.0))
    return tl.min(least, 0) * tl.where(count > 0, 1.0, 0.0)


@triton.jit
def window_mean(WINDOW, entry, slot, size, channel, real, channels, GEOMETRIC: tl.constexpr):
    """Mean of a window `[size, C]` with `entry` in its `slot`."""
    total = tl.zeros_like(entry)
    for row in range(size):
        value = tl.load(WINDOW + row * channels + channel, mask=real, other=1.0)
        value = tl.where(row == slot, entry, value)
        if GEOMETRIC:
            value = tl.log(tl.where(value > 0, value, 1.0))  # an empty slot is 0; no mean is used yet
        total += value
    mean = total / size
    return tl.exp(mean) if GEOMETRIC else mean


@triton.jit
def window_excess(
    SUM, SQUARE, COUNT, FINITE, RUNNING, WINDOW, NEXT, EXCESS,
    programs, shares, channels, size, floor,
    CENTER: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute this program's share, EXCESS `[blocks, 4]`, of what `is_outlier` compares over all channels.

    The share is the largest difference of the arithmetic and the geometric mean of the window with this batch; number,
    mean, and squared deviations of the roots of the window's entries from before.
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    _, batch, count = merged_moments(  # type: ignore[misc]
        SUM, SQUARE, COUNT, channel, programs, channels, CENTER, TILE, BLOCK
    )  # fmt: skip
    ok = usable(FINITE, shares, count, TILE) > 0
    entry = tl.where(ok, batch, tl.load(RUNNING + channel, mask=real, other=1.0))
    entry, slot = tl.maximum(entry, floor), tl.load(NEXT) % size
    smooth = window_mean(WINDOW, entry, slot, size, channel, real, channels, True)
    apart = window_mean(WINDOW, entry, slot, size, channel, real, channels, False) - smooth
    number = tl.sum(tl.where(real, 1.0, 0.0), 0) * size
    total = tl.zeros_like(entry)
    for row in range(size):
        total += tl.sqrt(tl.load(WINDOW + row * channels + channel, mask=real, other=0.0))
    mean = tl.sum(total, 0) / number
    square = tl.zeros_like(entry)
    for row in range(size):
        off = tl.sqrt(tl.load(WINDOW + row * channels + channel, mask=real, other=0.0)) - mean
        square += tl.where(real, off * off, 0.0)
    here = EXCESS + 4 * tl.program_id(0)
    tl.store(here, tl.max(tl.where(real, apart, float("-inf")), 0))
    tl.store(here + 1, number)
    tl.store(here + 2, mean)
    tl.store(here + 3, tl.sum(square, 0))


@triton.jit
def is_outlier(EXCESS, blocks, size, TILE: tl.constexpr):
    """1 if the step is an outlier (UN, Eq. 19), else 0."""
    most, number, total = (tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32),
                           tl.zeros([TILE], tl.float32))  # fmt: skip
    for start in range(0, blocks, TILE):
        i = start + tl.arange(0, TILE)
        most = tl.maximum(most, tl.load(EXCESS + 4 * i, mask=i < blocks, other=float("-inf")))
        entries = tl.load(EXCESS + 4 * i + 1, mask=i < blocks, other=0.0)
        number += entries
        total += entries * tl.load(EXCESS + 4 * i + 2, mask=i < blocks, other=0.0)
    entries = tl.sum(number, 0)
    mean = tl.sum(total, 0) / entries
    square = tl.zeros([TILE], tl.float32)
    for start in range(0, blocks, TILE):
        i = start + tl.arange(0, TILE)
        off = tl.load(EXCESS + 4 * i + 2, mask=i < blocks, other=0.0) - mean
        square += tl.load(EXCESS + 4 * i + 1, mask=i < blocks, other=0.0) * off * off
        square += tl.load(EXCESS + 4 * i + 3, mask=i < blocks, other=0.0)
    return tl.where(tl.max(most, 0) > tl.sum(square, 0) / (entries - 1.0) * size, 1, 0)


@triton.jit
def moved(old, target, share):
    """`old` moved by this share of the way to `target`; all of it is `target` itself."""
    apart = target - old
    return tl.where(share < 0.5, old + share * apart, target - (1.0 - share) * apart)


@triton.jit
def end_of_warmup(END, warmup):
    """Last step of the warm-up: `warmup` unless END, on the device, has another one."""
    if END is not None:
        end = tl.load(END)
        warmup = tl.where(end > 0, end, warmup)
    return warmup


@triton.jit
def train_rule(
    SUM, SQUARE, COUNT, FINITE, NEXT, RUNNING, STEP, SKIPPED, WINDOW, EXCESS, FILTERED, OUTLIER,
    BATCH, VALUE, TOTAL, SAVED_GRAD, SAVED_GAMMA, SMOOTH_GRAD, END,
    programs, shares, blocks, channels, size, eps, rate, warmup, floor,
    RULE: tl.constexpr, CENTER: tl.constexpr, UNBIASED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply a method's rule to the statistics of a batch.

    Updates RUNNING, STEP, SKIPPED, WINDOW and FILTERED. Writes the statistics to standardize with (VALUE), those of the
    batch, usable or not (BATCH), and what the backward needs (SAVED_GRAD, SAVED_GAMMA; OUTLIER).
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    mean, batch, count = merged_moments(  # type: ignore[misc]
        SUM, SQUARE, COUNT, channel, programs, channels, CENTER, TILE, BLOCK
    )  # fmt: skip
    good = usable(FINITE, shares, count, TILE)
    ok = good + tl.zeros([BLOCK], tl.float32) > 0
    step = tl.load(NEXT)
    warmup = end_of_warmup(END, warmup)
    running_mean = mean
    here = channel
    if CENTER:
        running_mean = tl.load(RUNNING + channel, mask=real, other=0.0)
        tl.store(BATCH + channel, mean, mask=real)
        mean = tl.where(ok, mean, running_mean)
        tl.store(VALUE + channel, mean, mask=real)
        here += channels
    running = tl.load(RUNNING + here, mask=real, other=1.0)
    tl.store(BATCH + here, batch, mask=real)
    batch = tl.where(ok, batch, running)  # unusable batch: fall back to the running statistics
    value = batch
    outlier = 0
    if RULE == "batch":
        new = batch
        if UNBIASED:
            new = batch * (count / tl.maximum(count - 1, 1.0))
        new = moved(running, new, rate)
    elif RULE == "running":
        warm = step <= warmup
        value = tl.where(warm, batch, running)
        new = moved(running, batch, tl.where(warm, tl.maximum(1.0 / step.to(tl.float32), floor), rate))
        tl.store(SAVED_GRAD + channel, tl.load(SMOOTH_GRAD + channel, mask=real, other=0.0), mask=real)
        tl.store(SAVED_GAMMA + channel, batch / (value + eps), mask=real)
    else:
        early = (step <= size) | (step < warmup)
        entry = tl.maximum(batch, floor)
        smooth = window_mean(WINDOW, entry, step % size, size, channel, real, channels, True)
        if OUTLIER is not None:
            outlier = tl.where(early, 0, is_outlier(EXCESS, blocks, size, TILE))
            early = early | (outlier > 0)
            entry = tl.where(outlier > 0, tl.maximum(running, floor), entry)
        value = tl.where(early, batch, smooth)
        new = moved(running, value, rate)
        tl.debug_barrier()  # threads may share a channel: all must have read before one writes
        tl.store(WINDOW + (step % size) * channels + channel, entry, mask=real & ok)
    tl.store(VALUE + here, value, mask=real)
    tl.debug_barrier()
    tl.store(RUNNING + here, new, mask=real & ok)
    if CENTER:
        tl.store(RUNNING + channel, moved(running_mean, mean, rate), mask=real & ok)
    if tl.program_id(0) == 0:
        tl.store(TOTAL, count)
        if OUTLIER is not None:
            tl.store(OUTLIER, outlier.to(tl.uint8))
        if good > 0:
            tl.store(STEP, step)
            if OUTLIER is not None:
                tl.store(FILTERED, tl.load(FILTERED) + outlier)
        else:
            tl.store(SKIPPED, tl.load(SKIPPED) + 1)


@triton.jit
def grad_rule(
    SUMS, FINITE, COUNT, STEP, W, SAVED_GRAD, SAVED_GAMMA, OUTLIER, SKIPPED, WINDOW_GRAD, SMOOTH_GRAD, END,
    REMOVED, DW, DB,
    programs, shares, channels, size, rate, warmup,
    RULE: tl.constexpr, CLAMP: tl.constexpr, CENTER: tl.constexpr, REAL: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute DW, DB and the statistics to remove (REMOVED); update the state."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    stride = channels * (4 if REAL else 2)
    total = total_of_shares(SUMS, channel, real, programs, stride, TILE, BLOCK)
    dot = total_of_shares(SUMS, channels + channel, real, programs, stride, TILE, BLOCK)
    if DW is not None:
        tl.store(DW + channel, dot.to(DW.dtype.element_ty), mask=real)
    if DB is not None:
        tl.store(DB + channel, total.to(DB.dtype.element_ty), mask=real)
    if REAL:
        total = total_of_shares(SUMS, 2 * channels + channel, real, programs, stride, TILE, BLOCK)
        dot = total_of_shares(SUMS, 3 * channels + channel, real, programs, stride, TILE, BLOCK)
    count = tl.load(COUNT)
    factor = load_vector(W, channel, real, 1.0) / tl.maximum(count, 1.0)
    batch = dot * factor
    value = batch
    if RULE != "exact":
        good = usable(FINITE, shares, count, TILE)
        ok = good + tl.zeros([BLOCK], tl.float32) > 0
        step = tl.load(STEP)
        warmup = end_of_warmup(END, warmup)
        before = tl.load(SMOOTH_GRAD + channel, mask=real, other=0.0)
        if RULE == "running":
            early = step <= warmup
            value = tl.load(SAVED_GRAD + channel, mask=real, other=0.0)
            decay = rate * tl.load(SAVED_GAMMA + channel, mask=real, other=0.0)
            if CLAMP:
                decay = tl.minimum(decay, 1.0)
            smooth = before - value * decay + rate * batch
        else:
            early = (step <= size) | (step < warmup)
            entry = batch
            if OUTLIER is not None:
                outlier = tl.load(OUTLIER) > 0
                early = early | outlier
                entry = tl.where(outlier, before, entry)
            value = window_mean(WINDOW_GRAD, entry, 0, size, channel, real, channels, False)
            for row in range(1, size):  # the oldest row is the first, and gives way
                later = tl.load(WINDOW_GRAD + row * channels + channel, mask=real, other=0.0)
                tl.store(WINDOW_GRAD + (row - 1) * channels + channel, later, mask=real & ok)
            tl.store(WINDOW_GRAD + (size - 1) * channels + channel, entry, mask=real & ok)
            smooth = moved(before, tl.where(early, batch, value), rate)
            value = smooth
        tl.debug_barrier()  # threads may share a channel: all must have read before one writes
        tl.store(SMOOTH_GRAD + channel, smooth, mask=real & ok)
        value = tl.where(early, batch, value)  # those of this batch are removed
        if (tl.program_id(0) == 0) & (good == 0):
            tl.store(SKIPPED, tl.load(SKIPPED) + 1)
    if REMOVED is not None:
        here = channel
        if CENTER:
            tl.store(REMOVED + channel, total * factor, mask=real)
            here += channels
        tl.store(REMOVED + here, value, mask=real)
