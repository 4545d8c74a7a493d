"""State of norms with batch statistics: its buffers, and when it changes."""

import copy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normkit.kernels import sync
from normkit.kernels.async_counter import AsyncCounter
from normkit.kernels.sync import Groups
from normkit.norms._base import Norm
from normkit.norms._options import Count, Processes
from normkit.norms._recompute import Records

OPTIONAL = ("pending", "pending_grad", "micro_step", "micro_step_grad", "averages", "lag", "warmup_end")  # of options
CALLS = 4  # a norm asks twice a step whether its warm-up has ended: on a GPU every second step copies or reads


class StatefulNorm(Norm, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Norm with running statistics.

    Buffers: `running [k, C]`, `step` (updates so far), `skipped` and `skipped_grad` (forwards and backwards without an
    update, as their statistics were not finite or no row was real). With accumulation the joint statistics of a
    step wait in `pending`, `pending_grad`, counted by `micro_step`, `micro_step_grad`. The forward or the backward
    writes a buffer, never both: compiled graphs cannot.

    As for PyTorch's BatchNorm, `track_running_stats = False` keeps the state as it is, in training too. Lightning's
    `BaseFinetuning` and `StochasticWeightAveraging` find both by the same base class, and what they read and set is
    here under their names. Not `num_features`: tools that would put another class in the norm's place, such as
    `SyncBatchNorm.convert_sync_batchnorm`, read it and fail. For them there is `sync=True`.
    """

    track_running_stats = True  # False: no statistic moves
    momentum = None  # unused: the options of a method have its place

    center: ClassVar[bool] = False  # True: statistics are mean and variance (k = 2), else a mean square (k = 1)
    alpha = 0.9  # share of the old value in `average`
    follows_optimizer = False  # new state waits in buffers `next_*` for the optimizer's step (follow_optimizer)

    processes: ClassVar[Groups] = ()  # over which a batch is sharded; see `_inputs.normalize_sharded`

    sync: bool | Processes = False
    steps_per_update: Count = 1

    def build(self) -> None:
        """Create parameters and buffers, from the options in `self`."""
        super().build()
        k = 1 + self.center
        self.running = nn.Buffer(torch.zeros(k, self.dim))
        self.step = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.skipped = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.skipped_grad = nn.Buffer(torch.zeros((), dtype=torch.long))
        if self.steps_per_update > 1:
            for side in ("", "_grad"):
                self.register_buffer(f"micro_step{side}", torch.zeros((), dtype=torch.long))
                self.register_buffer(f"pending{side}", torch.zeros(k * self.dim + 1))
        self.running[-1] = 1.0
        self.next_state: dict[str, tuple[str, ...]] = {}  # names of buffers `next_*`, by what waits for them
        self._records = Records()
        self._reset_counters()

    @property
    def accumulates(self) -> bool:
        """True if the state changes by several batches together."""
        return self.steps_per_update > 1 or self.follows_optimizer

    def extra_repr(self) -> str:
        """Return size, spec, and the processes of a group, which a spec cannot hold."""
        return super().extra_repr() + (f", sync over a group of {self.sync.size()}" if sync.is_group(self.sync) else "")  # pyright: ignore[reportAttributeAccessIssue]

    def process_groups(self) -> Groups:
        """Return the groups over which statistics are computed: those of a sharded batch, and that of `sync`."""
        synced = sync.groups_of(self.sync)
        return (*synced, *(group for group in self.processes if not any(sync.includes(each, group) for each in synced)))

    def _accumulate(
        self, side: str, batch: Tensor, count: Tensor, ok: Tensor, turn: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Join the statistics `[k, C]` of a batch and the pending ones.

        Args:
            side: "" for the forward, "_grad" for the backward.
            batch: Statistics of the batch.
            count: Number of its real rows.
            ok: True if the batch counts.
            turn: `micro_step` at the batch's forward.

        Returns the joint statistics, their number of rows, and True if the state changes now.
        """
        if not self.track_running_stats:
            return batch, count, ok
        pending = getattr(self, f"pending{side}")
        held = pending.to(batch.dtype)
        joint, rows = sync.join(held[:-1].view_as(batch), held[-1], batch, count, self.center and not side)
        joint = torch.where(ok, torch.cat([joint.flatten(), rows.view(1)]), held)
        stat, rows = joint[:-1].view_as(batch), joint[-1]
        if self.follows_optimizer:
            pending.copy_(joint)
            return stat, rows, ok
        micro_step, first = getattr(self, f"micro_step{side}"), turn - turn % self.steps_per_update
        before = read_with(ok, micro_step)
        # a forward without a backward, or two backwards of one forward, must not put both sides out of step
        micro_step.copy_(before.clamp(first, first + self.steps_per_update - 1) + 1)
        ends = micro_step % self.steps_per_update == 0
        pending.copy_(torch.where(ends, 0, joint))
        return stat, rows, ends & (rows > 0)

    def _commit(self, state: dict[str, Tensor], changes: Tensor) -> None:
        """Write new values into buffers where `changes` is True, without waiting for the device."""
        if not self.track_running_stats:
            return
        for name, new in state.items():
            old = getattr(self, f"next_{name}" if self.follows_optimizer else name)
            old.copy_(torch.where(changes, new, old))

    def average(self, batch: Tensor) -> Tensor:
        """Return the running statistics after this batch: `alpha * running + (1 - alpha) * batch`."""
        return self.running.lerp(batch.to(self.running.dtype), 1 - self.alpha)

    @property
    def running_mean(self) -> Tensor:
        """The running mean `[C]`; zeros where the method has none."""
        return self.running[0] if self.center else torch.zeros_like(self.running[0])

    @running_mean.setter
    def running_mean(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        if self.center:
            self.running[0].copy_(value)

    @property
    def running_var(self) -> Tensor:
        """The running variance `[C]`, or mean square."""
        return self.running[-1]

    @running_var.setter
    def running_var(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.running[-1].copy_(value)

    @property
    def num_batches_tracked(self) -> Tensor:
        """The number of updates so far, `step`."""
        return self.step.view(())

    @num_batches_tracked.setter
    def num_batches_tracked(self, value: Tensor) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self.step.copy_(value)
        self._reset_counters()

    def reset_running_stats(self) -> None:
        """Raise a TypeError: `update_bn` would go on with averages over all batches, which methods do not have."""
        raise TypeError(
            f"update_bn cannot measure the statistics of {type(self).__name__}; call normkit.calibrate(model, batches)"
        )

    def _reset_counters(self) -> None:
        """Forget what the host has seen of `step` and of the end of an automatic warm-up."""
        self._steps, self._ended = AsyncCounter(), AsyncCounter(CALLS)

    def reset_parameters(self) -> None:
        """Set parameters, running statistics, windows and counters to their initial values."""
        super().reset_parameters()
        self.reset_warmup()
        with torch.no_grad():
            self.running.zero_()
            self.running[-1] = 1.0

    def reset_warmup(self) -> None:
        """Restart the warm-up before fine-tuning: all state but `running` becomes zero."""
        for name, buffer in self.named_buffers(recurse=False):
            if name != "running":
                buffer.zero_()
        self._reset_counters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in OPTIONAL if f"{prefix}step" in state_dict else ():  # options of the saved norm may differ
            buffer = self._buffers.get(name)
            if buffer is not None and name not in self._non_persistent_buffers_set:
                device = state_dict[f"{prefix}step"].device  # ours may be "meta"
                state_dict.setdefault(prefix + name, torch.zeros_like(buffer, device=device))
                continue
            state_dict.pop(prefix + name, None)
            if buffer is not None:
                buffer.zero_()
        windows = (prefix + name for name in self._buffers if name.startswith("window"))
        if (step := state_dict.get(f"{prefix}step")) is not None and not all(name in state_dict for name in windows):
            state_dict[f"{prefix}step"] = torch.zeros_like(step)  # empty windows are filled in a warm-up
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args, **kwargs)
        self._reset_counters()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out records of the original's forwards, and the optimizer that it follows."""
        kept = {**super().__getstate__(), "follows_optimizer": False, "next_state": {}}
        return {
            **kept, "sync": Shared(self.sync) if sync.is_group(self.sync) else self.sync, "_records": Records(),
            "_steps": AsyncCounter(), "_ended": AsyncCounter(CALLS),
        }  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy, which has the group of the original."""
        super().__setstate__(state)
        if isinstance(self.sync, Shared):
            self.sync = self.sync.group

    def __deepcopy__(self, memo: dict[int, Any]) -> "StatefulNorm":
        """Copy by `__getstate__` also where PyTorch's parametrizations replace it."""
        twin = memo[id(self)] = self.__new__(type(self))
        twin.__setstate__(copy.deepcopy(StatefulNorm.__getstate__(self), memo))
        return twin


class Shared:
    """Process group in the state of a norm: copies share it, and it cannot be pickled."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> "Shared":
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a norm whose `sync` is a process group cannot be pickled; save its state_dict(), or set sync=True"
        )


def read_with(other: Tensor, buffer: Tensor) -> Tensor:
    """Return a buffer's value at the time of `other`, `[]` or of its shape.

    In a compiled backward pass, what does not depend on gradients is computed in the forward pass already, and another
    backward pass may change the buffer in between.
    """
    return torch.where(other == other, buffer, buffer) if torch.compiler.is_compiling() else buffer


def push(window: Tensor, step: Tensor, entry: Tensor) -> Tensor:
    """Return the window `[M, ...]` with `entry` in slot `step % M`."""
    slots = torch.arange(len(window), device=window.device).view(-1, *[1] * entry.dim())
    return torch.where(slots == step % len(window), entry, window)


def usable(batch: Tensor, count: Tensor) -> Tensor:
    """Return a tensor that is True if every statistic is finite and some row was real."""
    return ((batch - batch) == 0).all() & (count > 0)  # inf - inf and nan - nan are nan
