"""A norm's rules as parameters of a kernel, which applies them to its sums."""

import functools
from typing import Any, NamedTuple

from torch import Tensor

# of automatic warm-ups; rules.h has them, too
FAST, SLOW = 1 / 8, 1 / 32  # shares of the new value in the averages whose difference is the drift
LARGEST_LAG = 0.15  # the warm-up ends below it; 0.03 without any drift, seldom over 0.11
UNSEEN = 1e-4  # variance of a difference of 1 %, which is no drift
NEVER = 2**62  # the end of a warm-up that lasts
NOTICE = 16  # steps from the decision to the end


class KernelRule(NamedTuple):
    """Names and numbers of a method's rules.

    `triton/rule_kernels.py` and `cpu/rules.h` implement them; `train_stat` and `grad_stat` are the reference.

    Attributes:
        forward: Statistics to standardize with: "batch"; "running", those from before this batch; "geometric" or
            "arithmetic", the mean over a window; "renorm".
        backward: Gradient statistics to remove: "exact", this batch's; "running"; "windowed".
        rate: Share of the new value in `running`.
        rate_grad: Share of the new value in running gradient statistics.
        warmup: Steps of warm-up; or the buffer that will have its last step, 0 while it lasts, for kernels to read.
        until: Step from which a factor is free, or the steps at which bounds are reached.
        bounds: Bounds of a factor and of a shift.
        floor: Least value that a window records; with "running", least share of a new value in the warm-up.
        unbiased: Running variance with n / (n - 1).
        exact_early: The warm-up has the exact gradient.
        clamp: Limit the decay of PowerNorm's gradient statistics.
        window: Buffer `[M, C]` of recent statistics.
        window_grad: Buffer `[M, C]` of recent gradient statistics.
        smooth_grad: Buffer `[1, C]` of running gradient statistics.
        drift: Buffers `averages [3, C]`, `lag` and `warmup_end` of an automatic warm-up that has not ended.
    """

    forward: str
    backward: str = "exact"
    rate: float = 0.0
    rate_grad: float = 0.0
    warmup: int | Tensor = 0
    until: tuple[int, int] = (0, 0)
    bounds: tuple[float, float] = (1.0, 0.0)
    floor: float = 0.0
    unbiased: bool = False
    exact_early: bool = True
    clamp: bool = False
    window: Tensor | None = None
    window_grad: Tensor | None = None
    smooth_grad: Tensor | None = None
    drift: tuple[Tensor, ...] = ()


def find_kernel_rule(norm: Any) -> KernelRule | None:
    """The norm's `kernel_rule()` if kernels can apply it.

    That takes one process, one batch per step, statistics per channel, a rule that no subclass overrides, and plain
    tensors as buffers, because kernels write to their memory.
    """
    if norm.process_groups() or norm.accumulates or norm.scalar or not has_kernel_rule(type(norm)):
        return None
    for buffer in norm._buffers.values():
        if buffer is not None and (type(buffer) is not Tensor or not buffer.is_contiguous()):
            return None
    return norm.kernel_rule()


@functools.cache
def has_kernel_rule(kind: type) -> bool:
    """True if the class that defines the rules of `kind` also defines `kernel_rule`."""
    rules = {"train_stat", "grad_stat", "average", "kernel_rule"}
    return "kernel_rule" in vars(next(cls for cls in kind.__mro__ if rules & vars(cls).keys()))
