"""Decisions of training forwards, kept for backward passes and for activation checkpointing.

Checkpointing runs a forward again in the backward pass. The second run must use the statistics of the first, although
the state has changed since, and must not change the state again. So a norm keeps the `StepStatistics` of its forwards
for as long as their graphs live.
"""

import collections
import dataclasses
import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass(slots=True, weakref_slot=True, eq=False)  # not frozen, which would make it slow to create
class StepStatistics:
    """Decisions of one training forward, for its backward pass and for a recomputed forward.

    Attributes:
        batch: Statistics of this process's batch, `[k, C]`.
        value: Statistics to standardize with, `[k, C]`.
        count: Number of real rows, of all processes if these are synchronized.
        step: Number of this update, counted from 1.
        mask: `[...]`, True where a row is real; None if all are.
        packed: All of them, if kernels made them. The others are those of `rule.Stat`.
    """

    batch: Tensor
    value: Tensor
    count: Tensor
    step: Tensor
    output_scale: Tensor | None = None
    output_shift: Tensor | None = None
    grad_scale: Tensor | None = None
    dx_scale: Tensor | None = None
    mask: Tensor | None = None
    packed: Tensor | None = None
    saved: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields, those of `saved` last."""
        return (
            self.batch, self.value, self.count, self.step, self.output_scale, self.output_shift, self.grad_scale,
            self.dx_scale, self.mask, self.packed, *self.saved,
        )  # fmt: skip

    @property
    def key(self) -> Tensor:
        """A tensor of this forward alone."""
        return self.batch if self.packed is None else self.packed

    @classmethod
    def from_tensors(cls, tensors: tuple[Tensor | None, ...] | list[Tensor | None]) -> "StepStatistics":
        """Inverse of `tensors`."""
        return cls(*tensors[:10], tuple(tensors[10:]))  # type: ignore[arg-type]


def unpack(packed: Tensor, mask: Tensor | None, state: Any) -> StepStatistics:
    """Read the decisions of kernels (`new_decisions` in cpu/library.cpp) as views of their tensor.

    Args:
        packed: Of float32: step (64 bits), count and outlier (8 bits), then, each of `[k, C]`, batch and value, then
            what running statistics save, each of `[1, C]`.
        mask: `[...]`, True where a row is real; None if all are.
        state: The `State` of the norm.
    """
    k, channels = state.running.shape
    head, rows, rule, saved = packed[:4], packed[4:].view(-1, channels), state.kernel_rule, tuple[Tensor, ...]()
    if rule.forward == "running":
        saved = tuple(rows[2 * k :].split(1))
    elif rule.filtered is not None:
        saved = (head[3:].view(torch.uint8)[0].bool(),)
    step = head[:2].view(torch.int64)[0]
    return StepStatistics(rows[:k], rows[k : 2 * k], head[2], step, mask=mask, packed=packed, saved=saved)


def _unpack_alive(packed: Any, mask: Any, state: Any) -> StepStatistics | None:
    alive = packed()
    return None if alive is None else unpack(alive, mask and mask(), state)


def is_recomputed() -> bool:
    """Return True if a backward pass runs this forward again; compiled code cannot detect it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


Get = Callable[[], StepStatistics | None]


class Records:
    """Statistics of the forwards of one norm whose backward is still to come. A copy is empty."""

    def __init__(self) -> None:
        self._of_graphs: list[tuple[weakref.ref[Any], Get]] = []  # what the graph keeps alone, and the statistics
        self._most = 64  # of these, before the dead ones go
        self._without_graph: collections.deque[Get] = collections.deque(maxlen=64)  # uses in one step
        self._before, self._waiting = self._without_graph, 0  # of the step before; uses not recomputed yet
        self._last: Get = lambda: None  # its graph may be gone already, as after detach()
        self._uses: Any = WeakTensorKeyDictionary()

    def __reduce__(self) -> tuple[type["Records"], tuple[()]]:
        return Records, ()

    def add(self, statistics: StepStatistics, y: Tensor) -> None:
        """Keep the statistics of a forward as long as the graph of its output `y`."""
        if y.grad_fn is None:
            self._add(lambda: statistics)
        else:
            y.grad_fn.metadata["statistics"] = statistics  # type: ignore[index]
            self._add(lambda: statistics, alive := weakref.ref(statistics), alive)

    def add_packed(self, packed: Tensor, mask: Tensor | None, state: Any, y: Tensor) -> None:
        """As `add`, for decisions of kernels: the graph of `y` keeps this tensor and this mask."""
        get = functools.partial(unpack, packed, mask, state)
        if y.requires_grad:
            alive, of_mask = weakref.ref(packed), None if mask is None else weakref.ref(mask)
            self._add(get, alive, functools.partial(_unpack_alive, alive, of_mask, state))
        else:
            self._add(get)

    def _add(self, get: Get, alive: weakref.ref[Any] | None = None, get_alive: Get = lambda: None) -> None:
        self._last = get
        if alive is not None:
            self._of_graphs.append((alive, get_alive))
            if len(self._of_graphs) > self._most:
                self._of_graphs = [each for each in self._of_graphs if each[0]() is not None]
                self._most = 64 + 2 * len(self._of_graphs)
            return
        # frozen, or the first forward of reentrant checkpointing
        if self._waiting <= 0:  # a new step; the graph of the one before may be retained
            self._before, self._without_graph, self._waiting = self._without_graph, collections.deque(maxlen=64), 0
        self._waiting += 1
        self._without_graph.append(get)

    def find(self, x: Tensor, batch: Callable[[Tensor | None], Tensor]) -> StepStatistics | None:
        """Return statistics and mask of the first run of this forward, which is recomputed; None without one.

        `batch` computes statistics `[k, C]` of `x` under a mask, where several forwards are candidates.
        """
        self._waiting -= 1
        alive = (get for _, get in self._of_graphs)
        kept = [get() for get in (*self._before, *self._without_graph, *alive, self._last)]
        fit = (each for each in filter(None, kept) if each.mask is None or each.mask.shape == x.shape[:-1])
        candidates = [*{id(each.key): each for each in fit if each.batch.device == x.device}.values()][::-1]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        # select the forward of the same batch on the device, without waiting for it
        mine = {id(each.mask): batch(each.mask).nan_to_num() for each in candidates}
        distance = torch.stack([(each.batch.nan_to_num() - mine[id(each.mask)]).abs().sum() for each in candidates])
        # among equal ones, as of a batch that passes twice with other dropout, each in turn, the last one first
        uses = torch.stack([self._uses.setdefault(each.key, distance.new_zeros(())) for each in candidates])
        best = torch.where(distance == distance.min(), uses, torch.inf).argmin().view(1)
        for place, each in enumerate(candidates):
            self._uses[each.key].add_(best[0] == place)
        if any(each.packed is None for each in candidates):  # some forwards took the reference
            candidates = [dataclasses.replace(each, packed=None) for each in candidates]
        columns = zip(*(each.tensors() for each in candidates), strict=True)
        return StepStatistics.from_tensors([_select(column, best) for column in columns])


def _select(column: tuple[Tensor | None, ...], place: Tensor) -> Tensor | None:
    every = next((torch.ones_like(t) for t in column if t is not None), None)  # only a mask can be None in some
    return None if every is None else torch.stack([every if t is None else t for t in column]).index_select(0, place)[0]


@torch.library.custom_op("normkit::snapshot", mutates_args=())
def copy_tensors(tensors: list[Tensor]) -> list[Tensor]:
    """Copies that a compiled backward must keep instead of recomputing them.

    A compiled graph would otherwise recompute small tensors in the backward pass from the buffers that they were made
    of. The forward pass has overwritten these by then (seen with torch 2.13: window slots off by one). Activation
    checkpointing recomputes this op, too, unless `keep_statistics` excludes it: a RuntimeError.
    """
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "a compiled norm is recomputed in the backward pass, and its statistics have moved on; compile what calls "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=normkit.keep_statistics)"
        )
    return [t.clone() for t in tensors]


@copy_tensors.register_fake
def _(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.empty_like(t) for t in tensors]


def snapshot(statistics: StepStatistics) -> StepStatistics:
    """Copy the statistics for a compiled backward, as buffers are overwritten by then."""
    tensors = statistics.tensors()
    copies = iter(copy_tensors([t for t in tensors if t is not None]))
    return StepStatistics.from_tensors([None if t is None else next(copies) for t in tensors])


def keep_statistics() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Keep the decisions of norms when `torch.compile` recomputes activations.

    They are a few numbers for each norm. Pass it as `context_fn`, and compile the function that calls `checkpoint`:
    otherwise compiled norms with batch statistics raise a RuntimeError. Eager norms do not need it. With masks
    (`convert(..., mask_from=)`) the graph breaks at the checkpoint, so compile without `fullgraph=True`.

    Returns:
        The two context managers that `torch.utils.checkpoint.checkpoint` expects.

    Examples:
        >>> from torch.utils.checkpoint import checkpoint
        >>> def block(x):
        ...     return checkpoint(torch.tanh, x, use_reentrant=False, context_fn=keep_statistics)
        >>> block(torch.zeros(1))  # or torch.compile(block)
        tensor([0.])
    """

    def policy(context: object, op: object, *args: Any, **kwargs: Any) -> bool:
        if op is not torch.ops.normkit.snapshot.default:
            return False
        if type(args[0][0]) is Tensor:  # nothing traces it: the checkpoint is eager
            raise RuntimeError("an eager checkpoint would move compiled norms twice; compile what calls checkpoint()")
        return True

    return create_selective_checkpoint_contexts(policy)
