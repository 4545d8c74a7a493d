"""What a kernel has to know of a norm to apply its two rules by itself, in the launch that adds up partial sums."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels.step_statistics import StepStatistics


class KernelRule(NamedTuple):
    """A method's rules as `ops/triton/rule_kernels.py` and `ops/native/rules.h` know them.

    The rules in PyTorch stay the reference.
    `forward` and `backward` name what is done there; the rest are a method's own buffers and numbers.
    """

    forward: str  # "batch", "stale", "geometric", "arithmetic" or "renorm"
    backward: str = "exact"  # or "stale", "windowed"
    rate: float = 0.0  # share of the new value in `running`
    rate_grad: float = 0.0  # and in gradient statistics
    warmup: int = 0
    until: tuple[int, int] = (0, 0)  # the step from which a factor is free, or the steps when bounds are reached
    bounds: tuple[float, float] = (1.0, 0.0)  # of a factor and of a shift
    floor: float = 0.0  # of what a window records
    unbiased: bool = False  # running variance with n / (n - 1)
    exact_early: bool = True  # the warm-up has the exact gradient
    clamp: bool = False
    window: Tensor | None = None  # [M, C]
    window_grad: Tensor | None = None
    smooth_grad: Tensor | None = None  # [1, C]: what is removed from gradients, where a running mean is


Decided = tuple[Tensor | None, StepStatistics]  # y, where it is written already, and the step's decisions


def find_kernel_rule(norm: Any) -> KernelRule | None:
    """The norm's `mirror`, where it tells all: one process, one batch a step, no rule overridden further down.

    Buffers must be plain tensors too, for kernels write to their memory.
    """
    if norm.sync or norm.accumulates or not has_kernel_rule(type(norm)):
        return None
    plain = all(type(b) is Tensor and b.is_contiguous() for b in norm.buffers(recurse=False))
    return norm.kernel_rule() if plain else None


@functools.cache
def has_kernel_rule(kind: type) -> bool:
    rules = {"train_stat", "grad_stat", "average", "kernel_rule"}
    return "kernel_rule" in vars(next(cls for cls in kind.__mro__ if rules & vars(cls).keys()))


def moved(*buffers: Tensor | None) -> None:
    """Tell autograd that kernels wrote to these."""
    torch.autograd.graph.increment_version([b for b in buffers if b is not None])
