"""A whole training step of a norm by batch statistics in six launches or less, its rule applied in between.

Forward: sums, rule, standardize; backward: sums, rule, dx. Where the statistics are foretold, standardize and dx share
the reading of the sums, and the rule comes last.
"""

from typing import Any

import torch
from torch import Tensor

from normkit.kernels.kernel_rule import Decided, KernelRule, moved
from normkit.kernels.step_statistics import StepStatistics
from normkit.kernels.triton import channel_kernels, rule_kernels
from normkit.kernels.triton.channels import flags
from normkit.kernels.triton.launch import Launch, cdiv, column_launch, power_of_2
from normkit.kernels.triton.rows import as_rows, on, partial, whole

columns: Any = channel_kernels  # a checker takes a launch for a plain call
rules: Any = rule_kernels


def train(
    rule: Any, kernel_rule: KernelRule, x: Tensor, mask: Tensor | None, known_in_advance: Tensor | None
) -> Decided:
    """What `StatNorm` decides in a training forward, with its state moved, in two launches: y (None unless foretold);
    the batch's statistics, those to standardize with, the count, the step, `post` and `shift`; the memo.
    """
    rows, (n, channels) = as_rows(x), (x.numel() // x.shape[-1], x.shape[-1])
    launch, center = column_launch(n, channels), rule.center
    blocks = cdiv(channels, launch.block)
    y = None if known_in_advance is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    mean, var = (None, None) if known_in_advance is None else (known_in_advance[0], known_in_advance[-1])
    weight, bias = (None, None) if known_in_advance is None else (whole(rule.weight), whole(rule.bias))
    share = launch.programs, channels
    room = partial(share, x) if center else None, partial(share, x), partial((launch.programs, 1), x)
    well, step = partial((launch.programs, blocks), x), torch.empty_like(rule.step)
    batch, value = partial((1 + center, channels), x), partial((1 + center, channels), x)
    count = torch.empty((), dtype=torch.float32, device=x.device)
    output_scale = partial((1, channels), x)[0] if kernel_rule.forward in ("arithmetic", "renorm") else None
    shift = partial((1, channels), x)[0] if kernel_rule.forward == "renorm" else None
    saved = (partial((1, channels), x), partial((1, channels), x)) if kernel_rule.forward == "stale" else ()
    with on(x):
        columns.column_forward[(launch.programs, blocks)](
            rows, flags(mask), y, mean, var, weight, bias, None, None, *room, well, rule.step, step, n, channels,
            rows.stride(0), rule.eps, CENTER=center, **launch.meta,
        )  # fmt: skip
        rules.train_rule[second_grid(channels)](
            *room, well, step, rule.running, rule.step, rule.skipped, kernel_rule.window, batch, value, count, output_scale, shift,
            *(saved or (None, None)), kernel_rule.smooth_grad if saved else None, launch.programs, well.numel(), channels,
            0 if kernel_rule.window is None else len(kernel_rule.window), rule.eps, kernel_rule.rate, kernel_rule.warmup, *kernel_rule.until,
            *kernel_rule.bounds, kernel_rule.floor, RULE=kernel_rule.forward, CENTER=center, UNBIASED=kernel_rule.unbiased,
            **second_level(launch, channels),
        )  # fmt: skip
    moved(rule.running, rule.step, rule.skipped, kernel_rule.window)
    return y, StepStatistics(batch, value, count, step, output_scale, shift, saved=saved)


def differentiate(
    rule: Any, kernel_rule: KernelRule, dy: Tensor, x: Tensor, weight: Tensor | None, mask: Tensor | None,
    statistics: StepStatistics, known_in_advance: Tensor | None, has_bias: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias, state moved: three launches, two where what is removed was `foretold`."""
    rows, dys, (n, channels) = as_rows(x), as_rows(dy), (x.numel() // x.shape[-1], x.shape[-1])
    launch, center = column_launch(n, channels), rule.center
    blocks, real = cdiv(channels, launch.block), mask is not None and rule.pad_grad == "real"
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dw = None if weight is None else torch.empty_like(weight)
    db = torch.empty(channels, dtype=x.dtype if weight is None else weight.dtype, device=x.device) if has_bias else None
    removed = partial((1 + center, channels), x) if known_in_advance is None else None
    sums = partial((launch.programs, (4 if real else 2) * channels), x)
    well = None if kernel_rule.backward == "exact" else partial((launch.programs, blocks), x)
    stat, output_scale = statistics.value.contiguous(), whole(statistics.output_scale)
    shift, weight, mask = whole(statistics.output_shift), whole(weight), flags(mask)

    def walk(dx: Tensor | None, removed: Tensor | None, sums: Tensor | None, well: Tensor | None) -> None:
        columns.column_backward[(launch.programs, blocks)](
            dys, rows, mask, dx, stat[0], stat[-1], weight, output_scale, None, removed, sums, well, n, channels,
            dys.stride(0), rows.stride(0), rule.eps, CENTER=center, REAL=real, **launch.meta,
        )  # fmt: skip

    with on(x):
        walk(dx if removed is None else None, known_in_advance, sums, well)
        rules.grad_rule[second_grid(channels)](
            sums, well, statistics.count, statistics.step, weight, output_scale, shift, *(statistics.saved or (None, None)), rule.skipped_grad,
            kernel_rule.window_grad, kernel_rule.smooth_grad, removed, dw, db, launch.programs, launch.programs * blocks,
            channels, 0 if kernel_rule.window_grad is None else len(kernel_rule.window_grad), kernel_rule.rate_grad, kernel_rule.warmup,
            RULE=kernel_rule.backward, EXACT=kernel_rule.exact_early, CLAMP=kernel_rule.clamp, CENTER=center, REAL=real,
            **second_level(launch, channels),
        )  # fmt: skip
        if removed is not None:
            walk(dx, removed, None, None)
    moved(rule.skipped_grad, kernel_rule.window_grad, kernel_rule.smooth_grad)
    return dx, dw, db


def second_level(launch: Launch, channels: int) -> dict[str, int]:
    """The keywords of a kernel that adds up shares."""
    return {"TILE": min(power_of_2(launch.programs), 64), "BLOCK": min(power_of_2(channels), 32), "num_warps": 4}


def second_grid(channels: int) -> tuple[int]:
    """Its programs: 32 channels each."""
    return (cdiv(channels, min(power_of_2(channels), 32)),)
