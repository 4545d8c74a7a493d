"""Records of forwards, for activation checkpointing.

It runs a forward again inside the backward pass. The second run must use the statistics of the first, although the
state has changed since, and must not change the state again. So a norm keeps the `StepStatistics` of its forwards for
as long as their graphs live.
"""

import collections
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from normkit.kernels import autograd
from normkit.kernels.step_statistics import StepStatistics


def inside_backward() -> bool:
    """Return True if this forward is a recomputed one, run by a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_recomputed() -> bool:
    """Return True if this forward must change no state again; compiled code cannot detect it."""
    return not torch.compiler.is_compiling() and inside_backward()


class Record:
    """Statistics of one forward; the graph holds them, so both are freed together."""

    def __init__(self, statistics: StepStatistics):
        self.statistics = statistics


class Records:
    """Statistics of the forwards of one norm whose backward is still to come. A copy is empty."""

    def __init__(self) -> None:
        self._of_graphs: weakref.WeakValueDictionary[int, Record] = weakref.WeakValueDictionary()
        self._without_graph: collections.deque[Record] = collections.deque(maxlen=16)

    def __reduce__(self) -> tuple[type["Records"], tuple[()]]:
        return Records, ()

    def add(self, statistics: StepStatistics) -> Record | None:
        """Keep the statistics of a forward; the caller attaches the record to the graph."""
        if torch.compiler.is_compiling() or inside_backward():
            return None
        record = Record(statistics)
        if torch.is_grad_enabled():
            self._of_graphs[id(record)] = record
        else:  # reentrant checkpointing runs its first forward without a graph
            self._without_graph.append(record)
        return record

    def find(self, batch: Callable[[], Tensor]) -> StepStatistics | None:
        """Return the statistics of the first run if this forward is recomputed, else None.

        Args:
            batch: Computes the statistics `[k, C]` of this batch; called only if several forwards are candidates.
        """
        if not is_recomputed():
            return None
        candidates = [record.statistics for record in [*self._without_graph, *self._of_graphs.values()]][::-1]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        # select the forward of the same batch on the device, without waiting for it
        mine = batch()
        distance = torch.stack([(each.batch - mine).abs().sum() for each in candidates])
        best = distance.nan_to_num(nan=0.0).argmin().view(1)
        columns = zip(*(each.tensors() for each in candidates), strict=True)
        return StepStatistics.from_tensors(
            [None if c[0] is None else torch.stack(c).index_select(0, best)[0] for c in columns]
        )


def snapshot(statistics: StepStatistics) -> StepStatistics:
    """Copy the statistics for a compiled backward, as buffers are overwritten by then."""
    tensors = statistics.tensors()
    copies = iter(autograd.snapshot([t for t in tensors if t is not None]))
    return StepStatistics.from_tensors([None if t is None else next(copies) for t in tensors])
