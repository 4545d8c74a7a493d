"""The second level of sums and a method's rule in one launch: `StatNorm.train_stat` and `grad_stat` in Triton.

A program has a block of channels to itself, and writes the buffers of these; counters belong to program 0, and no
other reads them. Whether the batch is usable depends on all channels: each program reads what the column pass wrote
about every share (WELL), a few KB. The shares are summed in a fixed order, as everywhere.
"""

import triton
import triton.language as tl

from normkit.kernels.triton.channel_kernels import merged


@triton.jit
def usable(WELL, wells, count, TILE: tl.constexpr):
    """1 where some row was real and all shares are such that sums of them are numbers, else 0."""
    least = tl.full([TILE], 1.0, tl.float32)
    for start in range(0, wells, TILE):
        i = start + tl.arange(0, TILE)
        least = tl.minimum(least, tl.load(WELL + i, mask=i < wells, other=1.0))
    return tl.min(least, 0) * tl.where(count > 0, 1.0, 0.0)


@triton.jit
def pushed(WINDOW, entry, slot, size, ok, channel, real, channels, GEOMETRIC: tl.constexpr):
    """The mean of a window `[size, C]` whose `slot` is `entry` now; written down where the batch is usable."""
    total = tl.zeros_like(entry)
    for row in range(size):
        value = tl.load(WINDOW + row * channels + channel, mask=real, other=1.0)
        value = tl.where(row == slot, entry, value)
        if GEOMETRIC:
            value = tl.log(tl.where(value > 0, value, 1.0))  # 0 where nothing was recorded yet: too early to be used
        total += value
    tl.store(WINDOW + slot * channels + channel, entry, mask=real & ok)
    mean = total / size
    return tl.exp(mean) if GEOMETRIC else mean


@triton.jit
def grown(step, warmup, until):
    """0 up to the warm-up's end, then linearly to 1 at `until`."""
    share = (step - warmup).to(tl.float32) / tl.maximum(until - warmup, 1).to(tl.float32)
    return tl.minimum(tl.maximum(share, 0.0), 1.0)


@triton.jit
def train_rule(
    SUM, SQUARE, COUNT, WELL, NEXT, RUNNING, STEP, SKIPPED, WINDOW,
    BATCH, VALUE, TOTAL, POST, SHIFT, MEMO, GAMMA, SMOOTH_GRAD,
    programs, wells, channels, size, eps, rate, warmup, until_r, until_d, bound_r, bound_d, floor,
    RULE: tl.constexpr, CENTER: tl.constexpr, UNBIASED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What to standardize with (VALUE, POST, SHIFT) and what the backward pass needs; RUNNING, STEP, SKIPPED and WINDOW
    moved. BATCH is what was seen, usable or not.
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    mean, batch, count = merged(  # type: ignore[misc]
        SUM, SQUARE, COUNT, channel, programs, channels, CENTER, TILE, BLOCK
    )  # fmt: skip
    good = usable(WELL, wells, count, TILE)
    ok = good + tl.zeros([BLOCK], tl.float32) > 0
    step = tl.load(NEXT)
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
    batch = tl.where(ok, batch, running)  # a batch that says nothing: the past stands in
    value = batch
    if RULE == "batch":
        new = batch
        if UNBIASED:
            new = batch * (count / tl.maximum(count - 1, 1.0))
        new = running + rate * (new - running)
    elif RULE == "stale":
        warm = step <= warmup
        value = tl.where(warm, batch, running)
        new = running + tl.where(warm, 1.0 / step.to(tl.float32), rate) * (batch - running)
        tl.store(MEMO + channel, tl.load(SMOOTH_GRAD + channel, mask=real, other=0.0), mask=real)
        tl.store(GAMMA + channel, batch / (value + eps), mask=real)
    elif RULE == "renorm":
        sigma, batch_sigma = tl.sqrt(running + eps), tl.sqrt(batch + eps)
        most = 1.0 + (bound_r - 1.0) * grown(step, warmup, until_r)
        tl.store(POST + channel, tl.maximum(tl.minimum(batch_sigma / sigma, most), 1.0 / most), mask=real)
        most = bound_d * grown(step, warmup, until_d)
        shift = (mean - running_mean) / sigma
        tl.store(SHIFT + channel, tl.maximum(tl.minimum(shift, most), -most), mask=real)
        new = sigma + rate * (batch_sigma - sigma)
        new = new * new - eps
    else:
        smooth = pushed(WINDOW, tl.maximum(batch, floor), step % size, size, ok, channel, real, channels,
                        RULE == "geometric")  # fmt: skip
        early = (step <= size) | (step < warmup)
        value = tl.where(early, batch, smooth)
        new = running + rate * (value - running)
        if POST is not None:
            output_scale = tl.sqrt((value + eps) / (running + eps))
            output_scale = tl.minimum(tl.maximum(output_scale, 1.0 / bound_r), bound_r)
            tl.store(POST + channel, tl.where(step <= until_r, 1.0, output_scale), mask=real)
    tl.store(VALUE + here, value, mask=real)
    tl.debug_barrier()  # threads may hold the same channel: nobody writes before all have read
    tl.store(RUNNING + here, new, mask=real & ok)
    if CENTER:
        tl.store(RUNNING + channel, running_mean + rate * (mean - running_mean), mask=real & ok)
    if tl.program_id(0) == 0:
        tl.store(TOTAL, count)
        if good > 0:
            tl.store(STEP, step)
        else:
            tl.store(SKIPPED, tl.load(SKIPPED) + 1)


@triton.jit
def added(SUMS, here, real, programs, stride, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The programs' shares of one sum for a block of channels, in a fixed order."""
    total = tl.zeros([TILE, BLOCK], tl.float32)
    for start in range(0, programs, TILE):
        row = start + tl.arange(0, TILE)
        inside = (row < programs)[:, None] & real[None, :]
        total += tl.load(SUMS + row[:, None] * stride + here[None, :], mask=inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit
def grad_rule(
    SUMS, WELL, COUNT, STEP, W, POST, SHIFT, MEMO, GAMMA, SKIPPED, WINDOW, SMOOTH, REMOVED, DW, DB,
    programs, wells, channels, size, rate, warmup,
    RULE: tl.constexpr, EXACT: tl.constexpr, CLAMP: tl.constexpr, CENTER: tl.constexpr, REAL: tl.constexpr,
    TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DW and DB of the parameters, the gradient statistics to remove (REMOVED), SMOOTH, WINDOW and SKIPPED moved."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = channel < channels
    stride = channels * (4 if REAL else 2)
    total = added(SUMS, channel, real, programs, stride, TILE, BLOCK)
    dot = added(SUMS, channels + channel, real, programs, stride, TILE, BLOCK)
    factor = tl.full([BLOCK], 1.0, tl.float32)
    dw = dot
    if POST is not None:
        factor = tl.load(POST + channel, mask=real, other=0.0)
        dw = dot * factor
    if SHIFT is not None:
        dw += tl.load(SHIFT + channel, mask=real, other=0.0) * total
    if W is not None:
        factor = factor * tl.load(W + channel, mask=real, other=0.0).to(tl.float32)
    if DW is not None:
        tl.store(DW + channel, dw.to(DW.dtype.element_ty), mask=real)
    if DB is not None:
        tl.store(DB + channel, total.to(DB.dtype.element_ty), mask=real)
    if REAL:
        total = added(SUMS, 2 * channels + channel, real, programs, stride, TILE, BLOCK)
        dot = added(SUMS, 3 * channels + channel, real, programs, stride, TILE, BLOCK)
    count = tl.load(COUNT)
    factor = factor / tl.maximum(count, 1.0)
    batch = dot * factor
    value = batch
    if RULE != "exact":
        good = usable(WELL, wells, count, TILE)
        ok = good + tl.zeros([BLOCK], tl.float32) > 0
        step = tl.load(STEP)
        early = step <= warmup
        if RULE == "stale":
            before = tl.load(MEMO + channel, mask=real, other=0.0)
            lost = rate * tl.load(GAMMA + channel, mask=real, other=0.0)
            if CLAMP:
                lost = tl.minimum(lost, 1.0)
            value = before
            smooth = tl.load(SMOOTH + channel, mask=real, other=0.0) - before * lost + rate * batch
        else:
            early = (step <= size) | (step < warmup)
            value = pushed(WINDOW, batch, step % size, size, ok, channel, real, channels, False)
            value = tl.where(early, batch, value)
            smooth = value
            if SMOOTH is not None:
                before = tl.load(SMOOTH + channel, mask=real, other=0.0)
                smooth = before + rate * (value - before)
                value = smooth
        if SMOOTH is not None:
            tl.debug_barrier()
            tl.store(SMOOTH + channel, smooth, mask=real & ok)
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
