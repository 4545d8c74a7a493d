"""The kernels in C++ (`cpu/library.cpp`), for float32 and bfloat16 on a CPU.

`step` is a whole training step in one call, whose kernels run on a CPU or, launched from C++, on a GPU.
"""

from typing import Any

import torch
from torch import Tensor, nn

from normkit.kernels import build
from normkit.kernels.records import StepStatistics
from normkit.kernels.rule import NEVER, KernelRule, Rule, State

DTYPES = (torch.float32, torch.bfloat16)
PARAMETERS = (torch.float32, torch.bfloat16, torch.float16)  # types of weight and bias
FORWARD = ("batch", "running", "geometric")  # in the order of step.h
BACKWARD = ("exact", "running", "windowed")
library: Any = torch.ops.normkit  # has operations once `build.is_loaded()`


def standardize(
    x: Tensor, stat: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 0
) -> Tensor:  # fmt: skip
    """As `reference.standardize`, of `x` after layer-scale."""
    return library.standardize(x, stat, weight, bias, groups, eps)


# -- per token --------------------------------------------------------------------------------------------------------


def row_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, groups: int
) -> tuple[Tensor, None]:  # fmt: skip
    """As `reference.row_norm`, of one group; the gradient needs no more than `x`."""
    return library.row_norm(x, weight, bias, eps, kind == "scale", kind == "layer"), None


def row_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, saved: None, kind: str, eps: float, groups: int,
    wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias."""
    dx, sums = library.row_norm_grad(dy, x, weight, eps, kind == "scale", kind == "layer", any(wanted))
    dweight = sums[1].sum_to_size(weight.shape).to(weight.dtype) if weight is not None and any(wanted) else None
    return dx, dweight, sums[0].to(bias.dtype) if bias is not None and any(wanted) else None


# -- a training step --------------------------------------------------------------------------------------------------


def can_step(x: Tensor, parameters: tuple[Any, Any]) -> bool:
    """True if `step` reads the norm's parameters and, on a GPU, can launch kernels on `x`."""
    size, kind = x.shape[-1:], None
    for p in parameters:
        if p is not None:
            kind = p.dtype if kind is None else kind
            if not (type(p) in (Tensor, nn.Parameter) and p.dtype is kind and p.shape == size and p.is_contiguous()):
                return False
    fits = x.is_cpu or (not torch.version.hip and x.numel() // x.shape[-1] < 2**31 and build.is_loaded())
    return fits and (kind is None or kind in PARAMETERS)


def step(
    x: Tensor, parameters: tuple[Any, Any], mask: Tensor | None, rule: Rule, state: State, how: KernelRule,
    known: bool, plan: list[int], groups: int = 0, found: StepStatistics | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `reference.train_step`, in kernels; return y and the decisions, which `records.unpack` reads.

    With `known`, the statistics to standardize with and to remove do not depend on the batch, which is read once.
    `plan` lists launches on a GPU; it is empty for kernels in C++.
    """
    buffers, numbers = state.native = state.native or _arguments(rule, state, how)
    decisions = None if found is None else found.packed
    return library.step(x, *parameters, mask, decisions, buffers, numbers, known, groups, plan)


def _arguments(rule: Rule, state: State, how: KernelRule) -> tuple[list[Tensor | None], Tensor]:
    """Return buffers and numbers for all steps that use this state."""
    end = how.warmup
    buffers = [
        state.running, state.step, state.skipped, state.skipped_grad, how.window, how.window_grad, how.smooth_grad,
        how.filtered, end if isinstance(end, Tensor) else None,
    ]  # fmt: skip
    numbers = [
        FORWARD.index(how.forward), BACKWARD.index(how.backward), NEVER if isinstance(end, Tensor) else end,
        how.unbiased, how.clamp, rule.center, rule.pad_grad == "real", rule.eps, how.rate, how.rate_grad, how.floor,
    ]  # fmt: skip
    return buffers, torch.tensor(numbers, dtype=torch.float64, device="cpu")
