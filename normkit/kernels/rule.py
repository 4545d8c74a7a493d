"""What a norm with batch statistics decides in a training step, and its form for kernels."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels import sync
from normkit.kernels.records import Records

NEVER = 2**62  # the end of a warm-up that lasts
Rule = Any  # a method as a training step reads it: a `StatNorm`, which this package does not import


class Stat(NamedTuple):
    """Decisions of a method for one training forward.

    The output is `weight * (output_scale * z + output_shift) + bias` with the standardized x as z.

    Attributes:
        value: Statistics `[k, C]` to standardize with.
        state: New values of buffers, by name.
        output_scale: Constant factor on the standardized x, forward and backward, `[C]`; None for 1.
        output_shift: Constant added after `output_scale`, `[C]`; None for 0.
        grad_scale: Constant factor on the gradient, backward only, `[C]`; None for 1.
        dx_scale: Constant factor on dx, `[C]`; None for 1.
        saved: Tensors that `grad_stat` reads.
    """

    value: Tensor
    state: dict[str, Tensor]
    output_scale: Tensor | None = None
    output_shift: Tensor | None = None
    grad_scale: Tensor | None = None
    dx_scale: Tensor | None = None
    saved: tuple[Tensor, ...] = ()


class KernelRule(NamedTuple):
    """Both rules of a method as names and numbers, which kernels apply to their sums.

    `triton/rules.py` and `cpu/rules.h` implement them; `train_stat` and `grad_stat` are the reference.

    Attributes:
        forward: Statistics to standardize with: "batch"; "running", those from before this batch; "geometric", the mean
            over a window.
        backward: Gradient statistics to remove: "exact", this batch's; "running"; "windowed".
        rate: Share of the new value in `running`.
        rate_grad: Share of the new value in running gradient statistics.
        warmup: Steps of warm-up; or the buffer that will have its last step, 0 while it lasts, for kernels to read.
        floor: Least value that a window records; with "running", least share of a new value in the warm-up.
        unbiased: Running variance with n / (n - 1).
        clamp: Limit the decay of PowerNorm's gradient statistics.
        window: Buffer `[M, C]` of recent statistics.
        window_grad: Buffer `[M, C]` of recent gradient statistics.
        smooth_grad: Buffer `[1, C]` of running gradient statistics.
        filtered: Buffer that counts outliers; None if they are not filtered.
    """

    forward: str
    backward: str = "exact"
    rate: float = 0.0
    rate_grad: float = 0.0
    warmup: int | Tensor = 0
    floor: float = 0.0
    unbiased: bool = False
    clamp: bool = False
    window: Tensor | None = None
    window_grad: Tensor | None = None
    smooth_grad: Tensor | None = None
    filtered: Tensor | None = None


class State:
    """Buffers of a norm as attributes, and when they change.

    Forwards and their backward passes use it, until the norm gets other buffers or options. The backward pass does not
    ask the norm, to which `torch.func.functional_call` lends other buffers only for the forward.

    Args:
        buffers: By name.
        records: Decisions of forwards, for recomputation.
        processes: Groups of processes whose batches have joint statistics.
        follows_optimizer: The state changes when the optimizer steps, by the joint statistics of all batches since the
            last step. They wait in `pending` and `pending_grad`, the new values in buffers `next_*`.
        fixed: Nothing changes.
    """

    def __init__(
        self, buffers: dict[str, Any], records: Records, processes: sync.Groups, follows_optimizer: bool, fixed: bool
    ) -> None:
        for name, buffer in buffers.items():
            setattr(self, name, buffer)
        self.buffers, self.records, self.processes = buffers, records, processes
        self.follows_optimizer, self.fixed = follows_optimizer, fixed
        self.native_for: tuple[Any, ...] | None = None  # type, weight and bias for which kernels in C++ were chosen
        self.is_asked = False  # for its form for kernels, which is made once
        self.kernel_rule: KernelRule | None = None
        self.native: tuple[list[Tensor | None], Tensor] | None = None  # buffers and numbers for the kernels in C++

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no buffer {name!r}")

    def write(self, new: dict[str, Tensor], changes: Tensor) -> None:
        """Write new values into buffers where `changes` is True, without waiting for the device."""
        for name, value in new.items() if not self.fixed else ():
            old = self.buffers.get(f"next_{name}" if self.follows_optimizer else name)
            if old is None:
                raise ValueError(
                    f"a rule returned {name!r}, which is no buffer; the buffers are {', '.join(self.buffers)}"
                )
            check_shape(name, value, old)
            old.copy_(torch.where(changes, value, old))

    def join(self, name: str, batch: Tensor, count: Tensor, ok: Tensor, center: bool = False) -> tuple[Tensor, Tensor]:
        """Add the statistics `[k, C]` of a batch to the pending ones; return these, and their number of rows.

        Args:
            name: "pending" or "pending_grad".
            batch: Statistics of the batch.
            count: Number of its real rows.
            ok: True if the batch counts.
            center: Whether the statistics are mean and variance.
        """
        if self.fixed:
            return batch, count
        pending = self.buffers[name]
        held = pending.to(batch.dtype)
        joint, rows = sync.join(held[:-1].view_as(batch), held[-1], batch, count, center)
        joint = torch.where(ok, torch.cat([joint.flatten(), rows.view(1)]), held)
        pending.copy_(joint)
        return joint[:-1].view_as(batch), joint[-1]


def find_kernel_rule(rule: Any, state: State) -> KernelRule | None:
    """The norm's `kernel_rule()` if kernels can apply it, found once for each state.

    That takes one process, one batch per step, a state that moves, a rule that no subclass overrides, and plain tensors
    as buffers, because kernels write to their memory.
    """
    if not state.is_asked:
        plain = (b is None or (type(b) is Tensor and b.is_contiguous()) for b in state.buffers.values())
        one = not (state.processes or state.follows_optimizer or state.fixed)
        if one and has_kernel_rule(type(rule)) and all(plain):
            state.kernel_rule = rule.kernel_rule(state)
        state.is_asked = True
    return state.kernel_rule


@functools.cache
def has_kernel_rule(kind: type) -> bool:
    """True if the class that defines the rules of `kind` also defines `kernel_rule`."""
    rules = {"train_stat", "grad_stat", "average", "kernel_rule"}
    return "kernel_rule" in vars(next(cls for cls in kind.__mro__ if rules & vars(cls).keys()))


def check_shape(name: str, value: Tensor, like: Tensor) -> None:
    """Raise a ValueError if a rule returned a value of another shape, which would be broadcast."""
    if value.shape != like.shape:
        raise ValueError(f"a rule returned {name} of shape {[*value.shape]}; it must be {[*like.shape]}")


def push(window: Tensor, step: Tensor, entry: Tensor) -> Tensor:
    """Return the window `[M, ...]` with `entry` in slot `step % M`."""
    slots = torch.arange(len(window), device=window.device).view(-1, *[1] * entry.dim())
    return torch.where(slots == step % len(window), entry, window)


def read_with(other: Tensor, buffer: Tensor) -> Tensor:
    """Return a buffer's value at the time of `other`, `[]` or of its shape.

    In a compiled backward pass, what does not depend on gradients is computed in the forward pass already, and another
    backward pass may change the buffer in between.
    """
    return torch.where(other == other, buffer, buffer) if torch.compiler.is_compiling() else buffer


def usable(batch: Tensor, count: Tensor) -> Tensor:
    """Return a tensor that is True if every statistic is finite and some row was real."""
    return ((batch - batch) == 0).all() & (count > 0)  # inf - inf and nan - nan are nan
