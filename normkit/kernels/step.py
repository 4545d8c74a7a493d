"""A training step of a norm with batch statistics in one call of C++, on a CPU or a GPU.

`step.cpp` has it, backward pass included. Python took 0.1 ms more for each norm on a CPU, and 0.8 with
an H200.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from normkit.kernels import dispatch
from normkit.kernels.build import pass_addresses, step_op
from normkit.kernels.cpu import arguments, entry
from normkit.kernels.kernel_rule import NEVER, KernelRule
from normkit.kernels.step_statistics import StepStatistics

FORWARD = ("batch", "running", "geometric", "arithmetic", "renorm")  # in the order of rules.h
BACKWARD = ("exact", "running", "windowed")


def can_run(norm: Any, x: Tensor, kernels: ModuleType) -> bool:
    """True if the step can be compiled, and reads the norm's parameters."""
    weight, bias = norm.weight, norm.bias
    if not norm.track_running_stats:  # it always moves the state
        return False
    kind = torch.float32 if kernels is entry or weight is None else weight.dtype
    plain = all(
        p is None
        or (type(p) in (Tensor, nn.Parameter) and p.dtype is kind and p.shape == x.shape[-1:] and p.is_contiguous())
        for p in (weight, bias)
    )
    return plain and kind in dispatch.TRITON_DTYPES and (kernels is entry or _can_launch(x)) and bool(step_op())


def _can_launch(x: Tensor) -> bool:
    """True if C++ may launch kernels on `x`: by NVIDIA's driver, where no operation is traced."""
    return x.is_cuda and not torch.version.hip and x.numel() // x.shape[-1] < 2**31 and not dispatch.is_traced()


def run(
    norm: Any, kernel_rule: KernelRule, x: Tensor, mask: Tensor | None, groups: int,
    statistics: StepStatistics | None, kernels: ModuleType,
) -> tuple[Tensor, StepStatistics]:  # fmt: skip
    """Normalize by the norm's rule, or by the decisions of an earlier forward.

    Args:
        norm: The norm, whose state moves if there was no earlier forward.
        kernel_rule: Its rule.
        x: `[..., C]`, of a type that the kernels take.
        mask: `[...]`, True where a row is real.
        groups: Groups of layer-scale.
        statistics: Decisions of an earlier forward on the same batch.
        kernels: `cpu.entry` or `triton.entry`.

    Returns:
        y with its gradient, and the decisions.
    """
    op, rule, buffers, given = step_op(), kernel_rule, norm._buffers, list[Tensor | None]()
    assert op is not None
    in_cpp, end, drift = kernels is entry, rule.warmup, rule.drift or (None, None, None)
    if (of := statistics) is not None:
        given = [of.batch, of.value, of.count, of.step, of.output_scale, of.output_shift, *(of.saved or (None, None))]
    one_pass = statistics is None and norm.known_in_advance()
    numbers = [
        FORWARD.index(rule.forward), BACKWARD.index(rule.backward), one_pass,
        end if isinstance(end, int) else end.tolist() or NEVER if in_cpp else NEVER,
        *rule.until, rule.unbiased, rule.exact_early, rule.clamp, norm.center, groups, norm.pad_grad == "real",
    ]  # fmt: skip
    factors = [norm.eps, rule.rate, rule.rate_grad, *rule.bounds, rule.floor]
    state = [
        buffers["running"], buffers["step"], buffers["skipped"], buffers["skipped_grad"], rule.window,
        rule.window_grad, rule.smooth_grad, *drift, end if isinstance(end, Tensor) else None,
    ]  # fmt: skip
    addresses = pass_addresses(x.dtype) if in_cpp else kernels.plan(norm, rule, x, mask, one_pass)
    y, made = op(x, norm.weight, norm.bias, mask, state, given, numbers, factors, addresses)
    if statistics is None:
        statistics = StepStatistics(*made[:6], mask=mask, saved=tuple(t for t in made[6:] if t is not None))
    if arguments.observers or dispatch.current_block() is not None:
        _count(norm, x, y, mask, groups, one_pass, (made, state), "native" if in_cpp else "triton")
    return y, statistics


def _count(
    norm: Any, x: Tensor, y: Tensor, mask: Tensor | None, groups: int, one_pass: bool, other: object, kind: str
) -> None:
    """Report both passes as if Python called the kernels `train` and `differentiate`."""
    given = {"x": x, "mask": mask, "weight": norm.weight, "center": norm.center, "groups": groups, "other": other}
    block = dispatch.current_block()

    def report(kernel: str, op: str, **more: Any) -> None:
        with dispatch.resumed(block):
            dispatch.count(kind, op)
        for observer in arguments.observers if kind == "native" else ():
            observer(kernel, {**given, "known_in_advance": one_pass, **more})

    report("train", "standardize_and_moments" if one_pass else "moments", y=y, bias=norm.bias)
    if y.grad_fn is not None:
        y.grad_fn.register_hook(lambda dxs, dys: report("differentiate", "standardize_grad", dxs=dxs, dy=dys[0]))
