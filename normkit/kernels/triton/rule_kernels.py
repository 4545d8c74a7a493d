"""Rules of methods in Triton, in the launch that adds up the programs' shares.

`train_rule` is `StatNorm.train_stat`, `grad_rule` is `grad_stat`. Each program owns a block of channels and writes the
buffers of these; program 0 alone reads and writes counters. Whether the batch is usable depends on all channels: each
program reads FINITE, which the column pass wrote for every share, a few KB. Shares are summed in a fixed order, as
everywhere. `measure_drift`, a launch of its own, is `WarmupNorm.drift_state`.
"""

import triton
import triton.language as tl

from normkit.kernels.triton.column_kernels import merged_moments
from normkit.kernels.triton.shared_kernels import load_vector, total_of_shares


@triton.jit
def usable(FINITE, shares, count, TILE: tl.constexpr):
    """1 if some row was real and no sum of shares can overflow, else 0."""
    least = tl.full([TILE], 1.0, tl.float32)
    for start in range(0, shares, TILE):
        i = start + tl.arange(0, TILE)
        least = tl.minimum(least, tl.load(FINITE + i, mask=i < shares, other=1.0))
    return tl.min(least, 0) * tl.where(count > 0, 1.0, 0.0)


@triton.jit
def window_mean(WINDOW, entry, slot, size, ok, channel, real, channels, GEOMETRIC: tl.constexpr):
    """Mean of a window `[size, C]` with `entry` in its `slot`; stored if the batch is usable."""
    total = tl.zeros_like(entry)
    for row in range(size):
        value = tl.load(WINDOW + row * channels + channel, mask=real, other=1.0)
        value = tl.where(row == slot, entry, value)
        if GEOMETRIC:
            value = tl.log(tl.where(value > 0, value, 1.0))  # an empty slot is 0; no mean is used yet
        total += value
    tl.store(WINDOW + slot * channels + channel, entry, mask=real & ok)
    mean = total / size
    return tl.exp(mean) if GEOMETRIC else mean


@triton.jit
def ramp(step, warmup, until):
    """0 up to the end of warm-up, then linearly to 1 at `until`."""
    share = (step - warmup).to(tl.float32) / tl.maximum(until - warmup, 1).to(tl.float32)
    return tl.minimum(tl.maximum(share, 0.0), 1.0)


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
    SUM, SQUARE, COUNT, FINITE, NEXT, RUNNING, STEP, SKIPPED, WINDOW,
    BATCH, VALUE, TOTAL, OUTPUT_SCALE, OUTPUT_SHIFT, SAVED_GRAD, SAVED_GAMMA, SMOOTH_GRAD, END,
    programs, shares, channels, size, eps, rate, warmup, until_r, until_d, bound_r, bound_d, floor,
    RULE: tl.constexpr, CENTER: tl.constexpr, UNBIASED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply a method's rule to the statistics of a batch.

    Updates RUNNING, STEP, SKIPPED and WINDOW. Writes the statistics to standardize with (VALUE, OUTPUT_SCALE,
    OUTPUT_SHIFT), those of the batch, usable or not (BATCH), and what the backward needs (SAVED_GRAD, SAVED_GAMMA).
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
    elif RULE == "renorm":
        sigma, batch_sigma = tl.sqrt(running + eps), tl.sqrt(batch + eps)
        most = 1.0 + (bound_r - 1.0) * ramp(step, warmup, until_r)
        tl.store(OUTPUT_SCALE + channel, tl.maximum(tl.minimum(batch_sigma / sigma, most), 1.0 / most), mask=real)
        most = bound_d * ramp(step, warmup, until_d)
        shift = (mean - running_mean) / sigma
        tl.store(OUTPUT_SHIFT + channel, tl.maximum(tl.minimum(shift, most), -most), mask=real)
        new = moved(sigma, batch_sigma, rate)
        new = new * new - eps
    else:
        smooth = window_mean(WINDOW, tl.maximum(batch, floor), step % size, size, ok, channel, real, channels,
                        RULE == "geometric")  # fmt: skip
        early = (step <= size) | (step < warmup)
        value = tl.where(early, batch, smooth)
        new = moved(running, value, rate)
        if OUTPUT_SCALE is not None:
            output_scale = tl.sqrt((value + eps) / (running + eps))
            output_scale = tl.minimum(tl.maximum(output_scale, 1.0 / bound_r), bound_r)
            tl.store(
                OUTPUT_SCALE + channel, tl.where(step <= tl.maximum(until_r, warmup), 1.0, output_scale), mask=real
            )
    tl.store(VALUE + here, value, mask=real)
    tl.debug_barrier()  # threads may share a channel: all must have read before one writes
    tl.store(RUNNING + here, new, mask=real & ok)
    if CENTER:
        tl.store(RUNNING + channel, moved(running_mean, mean, rate), mask=real & ok)
    if tl.program_id(0) == 0:
        tl.store(TOTAL, count)
        if good > 0:
            tl.store(STEP, step)
        else:
            tl.store(SKIPPED, tl.load(SKIPPED) + 1)


@triton.jit
def measure_drift(
    BATCH, STEP, NEXT, AVERAGES, LAG, END, channels, floor,
    FAST: tl.constexpr, SLOW: tl.constexpr, LARGEST: tl.constexpr, UNSEEN: tl.constexpr, NOTICE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Follow the drift of statistics and note in END when the warm-up ends; one program."""
    step, lag = tl.load(NEXT), tl.load(LAG)
    if (tl.load(STEP) == step) & (tl.load(END) == 0):  # the step was taken: the batch was usable
        drift, noise = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
        for start in range(0, channels, BLOCK):
            channel = start + tl.arange(0, BLOCK)
            real = channel < channels
            level = tl.log(tl.maximum(tl.load(BATCH + channel, mask=real, other=1.0), floor))
            fast = tl.where(lag == 0, level, tl.load(AVERAGES + channel, mask=real, other=0.0))
            slow = tl.where(lag == 0, level, tl.load(AVERAGES + channels + channel, mask=real, other=0.0))
            variance = tl.load(AVERAGES + 2 * channels + channel, mask=real, other=0.0)
            apart = level - slow
            variance += SLOW * (apart * apart - variance)
            fast += FAST * (level - fast)
            slow += SLOW * apart
            tl.debug_barrier()  # threads may share a channel: all must have read before one writes
            tl.store(AVERAGES + channel, fast, mask=real)
            tl.store(AVERAGES + channels + channel, slow, mask=real)
            tl.store(AVERAGES + 2 * channels + channel, variance, mask=real)
            drift += tl.where(real, (fast - slow) * (fast - slow), 0.0)
            noise += tl.where(real, variance, 0.0)
        share = tl.sum(drift, 0) / (tl.sum(noise, 0) + UNSEEN * channels)
        before = tl.where(lag == 0, 1.0, lag)
        lag = before + SLOW * (share - before)
        tl.debug_barrier()
        tl.store(LAG, lag)
        if lag < LARGEST:
            tl.store(END, step + NOTICE)


@triton.jit
def grad_rule(
    SUMS, FINITE, COUNT, STEP, W, OUTPUT_SCALE, OUTPUT_SHIFT, SAVED_GRAD, SAVED_GAMMA, SKIPPED, WINDOW_GRAD,
    SMOOTH_GRAD, END, REMOVED, DW, DB,
    programs, shares, channels, size, rate, warmup,
    RULE: tl.constexpr, EXACT: tl.constexpr, CLAMP: tl.constexpr, CENTER: tl.constexpr, REAL: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute DW, DB and the statistics to remove (REMOVED); update the state."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    stride = channels * (4 if REAL else 2)
    total = total_of_shares(SUMS, channel, real, programs, stride, TILE, BLOCK)
    dot = total_of_shares(SUMS, channels + channel, real, programs, stride, TILE, BLOCK)
    output_scale = load_vector(OUTPUT_SCALE, channel, real, 1.0)
    dw = dot * output_scale + load_vector(OUTPUT_SHIFT, channel, real, 0.0) * total
    factor = output_scale * load_vector(W, channel, real, 1.0)
    if DW is not None:
        tl.store(DW + channel, dw.to(DW.dtype.element_ty), mask=real)
    if DB is not None:
        tl.store(DB + channel, total.to(DB.dtype.element_ty), mask=real)
    if REAL:
        total = total_of_shares(SUMS, 2 * channels + channel, real, programs, stride, TILE, BLOCK)
        dot = total_of_shares(SUMS, 3 * channels + channel, real, programs, stride, TILE, BLOCK)
    count = tl.load(COUNT)
    factor = factor / tl.maximum(count, 1.0)
    batch = dot * factor
    value = batch
    if RULE != "exact":
        good = usable(FINITE, shares, count, TILE)
        ok = good + tl.zeros([BLOCK], tl.float32) > 0
        step = tl.load(STEP)
        warmup = end_of_warmup(END, warmup)
        early = step <= warmup
        if RULE == "running":
            before = tl.load(SAVED_GRAD + channel, mask=real, other=0.0)
            decay = rate * tl.load(SAVED_GAMMA + channel, mask=real, other=0.0)
            if CLAMP:
                decay = tl.minimum(decay, 1.0)
            value = before
            smooth = tl.load(SMOOTH_GRAD + channel, mask=real, other=0.0) - before * decay + rate * batch
        else:
            early = (step <= size) | (step < warmup)
            value = window_mean(WINDOW_GRAD, batch, 0, size, ok & False, channel, real, channels, False)
            for row in range(1, size):  # the oldest row is the first, and gives way
                later = tl.load(WINDOW_GRAD + row * channels + channel, mask=real, other=0.0)
                tl.store(WINDOW_GRAD + (row - 1) * channels + channel, later, mask=real & ok)
            tl.store(WINDOW_GRAD + (size - 1) * channels + channel, batch, mask=real & ok)
            value = tl.where(early, batch, value)
            smooth = value
            if SMOOTH_GRAD is not None:
                smooth = moved(tl.load(SMOOTH_GRAD + channel, mask=real, other=0.0), value, rate)
                value = smooth
        if SMOOTH_GRAD is not None:
            tl.debug_barrier()
            tl.store(SMOOTH_GRAD + channel, smooth, mask=real & ok)
        if EXACT:
            value = tl.where(early, batch, value)
        if (tl.program_id(0) == 0) & (good == 0):
            tl.store(SKIPPED, tl.load(SKIPPED) + 1)
    if REMOVED is not None:
        here = channel
        if CENTER:
            tl.store(REMOVED + channel, total * factor, mask=real)
            here += channels
        tl.store(REMOVED + here, value, mask=real)
