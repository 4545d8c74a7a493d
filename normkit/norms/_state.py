"""State of norms with batch statistics: its buffers, and when it changes."""

import copy
import operator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from normkit.kernels import sync
from normkit.kernels.async_counter import AsyncCounter
from normkit.kernels.records import Records
from normkit.kernels.rule import State
from normkit.kernels.sync import Groups
from normkit.norms._base import Norm
from normkit.norms._options import Processes

OPTIONAL = ("pending", "pending_grad", "averages", "lag", "warmup_end")  # in some norms of a class


class StatefulNorm(Norm, nn.modules.batchnorm._BatchNorm):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Norm with running statistics.

    Buffers: `running [k, C]`, `step` (updates so far), `skipped` and `skipped_grad` (forwards and backwards without an
    update, as their statistics were not finite or no row was real). The forward or the backward writes a buffer, never
    both: compiled graphs cannot.

    As for PyTorch's BatchNorm, `track_running_stats = False` keeps the state as it is, in training too. Lightning's
    `BaseFinetuning` and `StochasticWeightAveraging` find both by the same base class, and what they read and set is
    here under their names. Not `num_features`: tools that would put another class in the norm's place, such as
    `SyncBatchNorm.convert_sync_batchnorm`, read it and fail. For them there is `sync=True`.
    """

    track_running_stats = True  # False: no statistic moves
    momentum = None  # unused: the options of a method have its place

    center: ClassVar[bool] = False  # True: statistics are mean and variance (k = 2), else a mean square (k = 1)
    alpha = 0.9  # share of the old value in running statistics
    follows_optimizer = False  # new state waits in buffers `next_*` for the optimizer's step (follow_optimizer)

    processes: ClassVar[Groups] = ()  # over which a batch is sharded; see `_inputs.normalize_sharded`
    _settings: ClassVar[frozenset[str]]  # attributes that a `State` and rules depend on, besides the buffers
    _state = None  # that of the last training step, until a setting changes

    sync: bool | Processes = False
    was_set = False  # running statistics were calibrated or loaded since the norm was made

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        options = (each.attribute for each in cls.declared.values())
        cls._settings = frozenset({*options, "track_running_stats", "follows_optimizer", "processes"})

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a setting takes effect at the next step."""
        if name in self._settings:
            self._state = None
        super().__setattr__(name, value)

    def build(self) -> None:
        """Create parameters and buffers, from the options in `self`."""
        super().build()
        k = 1 + self.center
        self.running = nn.Buffer(torch.zeros(k, self.dim))
        self.step = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.skipped = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.skipped_grad = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.running[-1] = 1.0
        self.next_state: dict[str, tuple[str, ...]] = {}  # names of buffers `next_*`, by what waits for them
        self._records = Records()
        self._reset_counters()

    def extra_repr(self) -> str:
        """Return size, spec, and the processes of a group, which a spec cannot hold."""
        return super().extra_repr() + (f", sync over a group of {self.sync.size()}" if sync.is_group(self.sync) else "")  # pyright: ignore[reportAttributeAccessIssue]

    def process_groups(self) -> Groups:
        """Return the groups over which statistics are computed: those of a sharded batch, and that of `sync`."""
        synced = sync.groups_of(self.sync)
        return (*synced, *(group for group in self.processes if not any(sync.includes(each, group) for each in synced)))

    def state(self) -> State:
        """Return the buffers as they are now, for training steps."""
        return State(
            dict(self._buffers), self._records, self.process_groups(), self.follows_optimizer,
            fixed=not self.track_running_stats,
        )  # fmt: skip

    def kept_state(self) -> State:
        """Return `state()`, the same object until a buffer or an option is another one."""
        kept, buffers = self._state, self._buffers
        if (
            kept is None
            or len(kept.buffers) != len(buffers)
            or not all(map(operator.is_, kept.buffers.values(), buffers.values()))
            or self.sync is not False  # processes may be connected later
        ):
            self._state = kept = self.state()
        return kept

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
        """Raise a TypeError: `update_bn` sets averages over all batches, which methods lack."""
        raise TypeError(
            f"update_bn cannot measure the statistics of {type(self).__name__}; call normkit.calibrate(model, batches)"
        )

    def _reset_counters(self) -> None:
        """Forget what the host has seen of `step` and of the end of an automatic warm-up."""
        self._steps, self._ended = AsyncCounter(), AsyncCounter()

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
        self.was_set = False
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
        self.was_set = True
        self._reset_counters()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out records of the original's forwards, and the optimizer that it follows."""
        kept = {**super().__getstate__(), "follows_optimizer": False, "next_state": {}}
        return {
            **kept, "sync": Shared(self.sync) if sync.is_group(self.sync) else self.sync, "_records": Records(),
            "_steps": AsyncCounter(), "_ended": AsyncCounter(), "_state": None,
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
