"""A training step of a norm with batch statistics in one call of C++.

`step.cpp` has it, backward pass included. Python would take 0.1 ms more for each norm.
"""

from typing import Any

import torch
from torch import Tensor, nn

from normkit.kernels import dispatch
from normkit.kernels.cpu import arguments
from normkit.kernels.cpu.build import step_op
from normkit.kernels.kernel_rule import NEVER, KernelRule
from normkit.kernels.step_statistics import StepStatistics

FORWARD = ("batch", "running", "geometric", "arithmetic", "renorm")  # in the order of rules.h
BACKWARD = ("exact", "running", "windowed")


def can_run(norm: Any) -> bool:
    """True if the parameters are plain float32 tensors, and the step can be compiled."""
    return all(
        p is None or (type(p) in (Tensor, nn.Parameter) and p.dtype is torch.float32 and p.is_contiguous())
        for p in (norm.weight, norm.bias)
    ) and bool(step_op())


def run(
    norm: Any, kernel_rule: KernelRule, x: Tensor, mask: Tensor | None, groups: int, statistics: StepStatistics | None
) -> tuple[Tensor, StepStatistics]:
    """Normalize by the norm's rule, or by the decisions of an earlier forward.

    Args:
        norm: The norm, whose state moves if there was no earlier forward.
        kernel_rule: Its rule.
        x: `[..., C]`, float32 or bfloat16.
        mask: `[...]`, True where a row is real.
        groups: Groups of layer-scale.
        statistics: Decisions of an earlier forward on the same batch.

    Returns:
        y with its gradient, and the decisions.
    """
    op, rule, buffers, given = step_op(), kernel_rule, norm._buffers, list[Tensor | None]()
    assert op is not None
    if (of := statistics) is not None:
        given = [of.batch, of.value, of.count, of.step, of.output_scale, of.output_shift, *(of.saved or (None, None))]
    one_pass = statistics is None and norm.known_in_advance() is not None
    numbers = [
        FORWARD.index(rule.forward), BACKWARD.index(rule.backward), one_pass,
        rule.warmup.tolist() or NEVER if isinstance(rule.warmup, Tensor) else rule.warmup,
        *rule.until, rule.unbiased, rule.exact_early, rule.clamp, norm.center, groups, norm.pad_grad == "real",
    ]  # fmt: skip
    factors = [norm.eps, rule.rate, rule.rate_grad, *rule.bounds, rule.floor]
    state = [
        buffers["running"], buffers["step"], buffers["skipped"], buffers["skipped_grad"], rule.window,
        rule.window_grad, rule.smooth_grad, *(rule.drift or (None, None, None)),
    ]  # fmt: skip
    y, made = op(x, norm.weight, norm.bias, mask, state, given, numbers, factors)
    if statistics is None:
        statistics = StepStatistics(*made[:6], mask=mask, saved=tuple(t for t in made[6:] if t is not None))
    if arguments.observers or dispatch.current_block() is not None:
        _count(norm, x, y, mask, groups, one_pass, (made, state))
    return y, statistics


def _count(norm: Any, x: Tensor, y: Tensor, mask: Tensor | None, groups: int, one_pass: bool, other: object) -> None:
    """Report both passes as if Python called the kernels `train` and `differentiate`."""
    given = {"x": x, "mask": mask, "weight": norm.weight, "center": norm.center, "groups": groups, "other": other}

    def report(kernel: str, op: str, **more: Any) -> None:
        dispatch.count("native", op)
        for observer in arguments.observers:
            observer(kernel, {**given, "known_in_advance": one_pass, **more})

    report("train", "standardize_and_moments" if one_pass else "moments", y=y, bias=norm.bias)
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda dxs, dys: report("differentiate", "standardize_grad", dxs=dxs, dy=dys[0]))
