"""Training steps of norms with batch statistics, in at most six launches.

Forward: sums, rule, standardize. Backward: sums, rule, dx. If the statistics are known in advance, standardize and dx
share the reading of the sums, and the rule comes last. An automatic warm-up takes one launch more until it ends.
"""

from typing import Any

import torch
from torch import Tensor

from normkit.kernels.kernel_rule import FAST, LARGEST_LAG, NEVER, NOTICE, SLOW, UNSEEN, KernelRule, mark_written
from normkit.kernels.step_statistics import StepStatistics
from normkit.kernels.triton import column_kernels, rule_kernels
from normkit.kernels.triton.columns import flags, new_shares
from normkit.kernels.triton.launch import cdiv, column_launch, power_of_2, sum_grid, sum_launch
from normkit.kernels.triton.rows import as_rows, contiguous, device_of, scratch

columns: Any = column_kernels  # type checkers take a launch for a plain call
rules: Any = rule_kernels


def train(
    norm: Any, kernel_rule: KernelRule, x: Tensor, mask: Tensor | None, known_in_advance: Tensor | None
) -> tuple[Tensor | None, StepStatistics]:
    """Sum over `x`, apply the rule and move the norm's state.

    Returns:
        y (None unless the statistics are known in advance) and the decisions of the step.
    """
    rows, (n, channels) = as_rows(x), (x.numel() // x.shape[-1], x.shape[-1])
    launch, center = column_launch(n, channels), norm.center
    blocks = cdiv(channels, launch.block)
    y = mean = var = weight = bias = None
    if known_in_advance is not None:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mean, var = known_in_advance[0], known_in_advance[-1]
        weight, bias = contiguous(norm.weight), contiguous(norm.bias)
    shares = new_shares(x, center, launch)
    finite, step = scratch((launch.programs, blocks), x), torch.empty_like(norm.step)
    batch, value = scratch((1 + center, channels), x), scratch((1 + center, channels), x)
    count = torch.empty((), dtype=torch.float32, device=x.device)
    rule, window = kernel_rule.forward, kernel_rule.window
    output_scale = scratch((1, channels), x)[0] if rule in ("arithmetic", "renorm") else None
    output_shift = scratch((1, channels), x)[0] if rule == "renorm" else None
    saved = (scratch((1, channels), x), scratch((1, channels), x)) if rule == "running" else ()
    end, warmup = _end(kernel_rule)
    with device_of(x, norm.running):
        columns.column_forward[(launch.programs, blocks)](
            rows, flags(mask), y, mean, var, weight, bias, None, None, *shares, finite, norm.step, step, n, channels,
            rows.stride(0), norm.eps, CENTER=center, **launch.meta,
        )  # fmt: skip
        rules.train_rule[sum_grid(channels)](
            *shares, finite, step, norm.running, norm.step, norm.skipped, window, batch, value, count, output_scale,
            output_shift, *(saved or (None, None)), kernel_rule.smooth_grad if saved else None, end,
            launch.programs, finite.numel(), channels, 0 if window is None else len(window), norm.eps, kernel_rule.rate,
            warmup, *kernel_rule.until, *kernel_rule.bounds, kernel_rule.floor, RULE=rule, CENTER=center,
            UNBIASED=kernel_rule.unbiased, **sum_launch(launch.programs, channels),
        )  # fmt: skip
        if kernel_rule.drift:
            rules.measure_drift[(1,)](
                batch[-1], norm.step, step, *kernel_rule.drift, channels, norm.floor, FAST=FAST, SLOW=SLOW,
                LARGEST=LARGEST_LAG, UNSEEN=UNSEEN, NOTICE=NOTICE, BLOCK=min(power_of_2(channels), 1024), num_warps=4,
            )  # fmt: skip
    mark_written(norm.running, norm.step, norm.skipped, window, *kernel_rule.drift)
    return y, StepStatistics(batch, value, count, step, output_scale, output_shift, mask=mask, saved=saved)


def differentiate(
    norm: Any, kernel_rule: KernelRule, dy: Tensor, x: Tensor, weight: Tensor | None, mask: Tensor | None,
    statistics: StepStatistics, known_in_advance: Tensor | None, has_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute gradients of x, weight and bias and move the norm's state.

    Three launches; two suffice if what to remove is known in advance.
    """
    rows, dys, (n, channels) = as_rows(x), as_rows(dy), (x.numel() // x.shape[-1], x.shape[-1])
    launch, center = column_launch(n, channels), norm.center
    blocks, real = cdiv(channels, launch.block), mask is not None and norm.pad_grad == "real"
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = None if weight is None else torch.empty_like(weight)
    db = torch.empty(channels, dtype=x.dtype if weight is None else weight.dtype, device=x.device) if has_bias else None
    removed = scratch((1 + center, channels), x) if known_in_advance is None else None
    sums = scratch((launch.programs, (4 if real else 2) * channels), x)
    finite = None if kernel_rule.backward == "exact" else scratch((launch.programs, blocks), x)
    stat, output_scale = statistics.value.contiguous(), contiguous(statistics.output_scale)
    output_shift, weight, mask = contiguous(statistics.output_shift), contiguous(weight), flags(mask)
    window, smooth = kernel_rule.window_grad, kernel_rule.smooth_grad
    end, warmup = _end(kernel_rule)

    def column_pass(dx: Tensor | None, removed: Tensor | None, sums: Tensor | None, finite: Tensor | None) -> None:
        columns.column_backward[(launch.programs, blocks)](
            dys, rows, mask, dx, stat[0], stat[-1], weight, output_scale, None, removed, sums, finite, n, channels,
            dys.stride(0), rows.stride(0), norm.eps, CENTER=center, REAL=real, **launch.meta,
        )  # fmt: skip

    with device_of(x):
        column_pass(dx if removed is None else None, known_in_advance, sums, finite)
        rules.grad_rule[sum_grid(channels)](
            sums, finite, statistics.count, statistics.step, weight, output_scale, output_shift,
            *(statistics.saved or (None, None)), norm.skipped_grad, window, smooth, end, removed, dw, db,
            launch.programs, launch.programs * blocks, channels, 0 if window is None else len(window),
            kernel_rule.rate_grad, warmup, RULE=kernel_rule.backward, EXACT=kernel_rule.exact_early,
            CLAMP=kernel_rule.clamp, CENTER=center, REAL=real, **sum_launch(launch.programs, channels),
        )  # fmt: skip
        if removed is not None:
            column_pass(dx, removed, None, None)
    mark_written(norm.skipped_grad, window, smooth)
    return dx, dw, db


def _end(kernel_rule: KernelRule) -> tuple[Tensor | None, int]:
    """The end of the warm-up, on the device or as a number."""
    end = kernel_rule.warmup
    return (end, NEVER) if isinstance(end, Tensor) else (None, end)
