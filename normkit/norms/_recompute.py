"""Records of forwards, for activation checkpointing.

Checkpointing runs a forward again in the backward pass. The second run must use the statistics of the first, although
the state has changed since, and must not change the state again. So a norm keeps the `StepStatistics` of its forwards
for as long as their graphs live.
"""

import collections
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from normkit.kernels import autograd
from normkit.kernels.step_statistics import StepStatistics


def is_recomputed() -> bool:
    """Return True if a backward pass runs this forward again; compiled code cannot detect it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class Records:
    """Statistics of the forwards of one norm whose backward is still to come. A copy is empty."""

    def __init__(self) -> None:
        self._of_graphs: weakref.WeakValueDictionary[int, StepStatistics] = weakref.WeakValueDictionary()
        self._without_graph: collections.deque[StepStatistics] = collections.deque(maxlen=64)  # uses in one step
        self._before, self._waiting = self._without_graph, 0  # of the step before; uses not recomputed yet
        self._last: StepStatistics | None = None  # its graph may be gone already, as after detach()
        self._uses: weakref.WeakKeyDictionary[StepStatistics, Tensor] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> tuple[type["Records"], tuple[()]]:
        return Records, ()

    def add(self, statistics: StepStatistics, y: Tensor) -> None:
        """Keep the statistics of a forward as long as the graph of its output `y`."""
        if torch.compiler.is_compiling() or is_recomputed():
            return
        self._last = statistics
        if y.grad_fn is None:  # frozen, or the first forward of reentrant checkpointing
            if self._waiting <= 0:  # a new step; the graph of the one before may be retained
                self._before, self._without_graph, self._waiting = self._without_graph, collections.deque(maxlen=64), 0
            self._waiting += 1
            self._without_graph.append(statistics)
        else:
            y.grad_fn.metadata["statistics"] = self._of_graphs[id(statistics)] = statistics  # type: ignore[index]

    def find(self, x: Tensor, batch: Callable[[Tensor | None], Tensor]) -> StepStatistics | None:
        """Return statistics and mask of the first run if this forward is recomputed, else None.

        Args:
            x: The batch.
            batch: Computes its statistics `[k, C]` under a mask; called only if several forwards are candidates.
        """
        if not is_recomputed():
            return None
        self._waiting -= 1
        kept = [*self._before, *self._without_graph, *self._of_graphs.values(), *filter(None, [self._last])]
        fit = (each for each in kept if each.mask is None or each.mask.shape == x.shape[:-1])
        candidates = [each for each in dict.fromkeys(fit) if each.batch.device == x.device][::-1]
        if len(candidates) < 2:
            return candidates[0] if candidates else None
        # select the forward of the same batch on the device, without waiting for it
        mine = {id(each.mask): batch(each.mask).nan_to_num() for each in candidates}
        distance = torch.stack([(each.batch.nan_to_num() - mine[id(each.mask)]).abs().sum() for each in candidates])
        # among equal ones, as of a batch that passes twice with other dropout, each in turn, the last one first
        uses = torch.stack([self._uses.setdefault(each, distance.new_zeros(())) for each in candidates])
        best = torch.where(distance == distance.min(), uses, torch.inf).argmin().view(1)
        for place, each in enumerate(candidates):
            self._uses[each].add_(best[0] == place)
        columns = zip(*(each.tensors() for each in candidates), strict=True)
        return StepStatistics.from_tensors([_select(column, best) for column in columns])


def _select(column: tuple[Tensor | None, ...], place: Tensor) -> Tensor | None:
    every = next((torch.ones_like(t) for t in column if t is not None), None)  # only a mask can be None in some
    return None if every is None else torch.stack([every if t is None else t for t in column]).index_select(0, place)[0]


def snapshot(statistics: StepStatistics) -> StepStatistics:
    """Copy the statistics for a compiled backward, as buffers are overwritten by then."""
    tensors = statistics.tensors()
    copies = iter(autograd.snapshot([t for t in tensors if t is not None]))
    return StepStatistics.from_tensors([None if t is None else next(copies) for t in tensors])
