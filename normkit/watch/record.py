"""How far each batch's statistics are from the running ones, per norm, while a model trains (PowerNorm, Figure 2)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.norms import StatNorm
from normkit.ops import channels


class Row(NamedTuple):
    """One number of one norm at one step."""

    step: int
    site: str
    norm: str
    quantity: str
    value: float


class Rows:
    """The rows recorded so far, oldest first; reading them is what waits for the device.

    A row's `step` counts the training forwards of the whole model, the first is 1. Quantities, with d channels:
    `distance_mean` and `distance_var`, or `distance_quadratic` where a norm does not center,
    = (1/d) ||batch - running||, the running statistics taken before this batch moves them.
    """

    def __init__(self) -> None:
        self._read: list[Row] = []
        self._waiting: list[tuple[int, str, str, Tensor]] = []

    def add(self, step: int, site: str, norm: str, distances: Tensor) -> None:
        """Note distances `[k]` without asking the device for their values."""
        self._waiting.append((step, site, norm, distances))

    def extend(self, rows: list[Row]) -> None:
        """Take over rows of an earlier recording, which this one continues."""
        self._read.extend(rows)

    def __iter__(self) -> Iterator[Row]:
        if self._waiting:
            values = iter(torch.cat([distances for *_, distances in self._waiting]).tolist())
            for step, site, norm, distances in self._waiting:
                names = ("distance_mean", "distance_var") if len(distances) == 2 else ("distance_quadratic",)
                self._read.extend(Row(step, site, norm, name, next(values)) for name in names)
            self._waiting.clear()
        return iter(list(self._read))

    def __len__(self) -> int:
        return len(list(iter(self)))


@contextmanager
def record(model: nn.Module, every: int = 1, start: int = 0) -> Iterator[Rows]:
    """Record the statistics of every norm with batch statistics, each `every` training forwards of the model.

    `start` is the number of forwards made before, where a run is resumed. Nothing about the training changes.

    >>> import normkit
    >>> model = nn.Sequential(nn.Linear(4, 4), normkit.make("pnv", 4))
    >>> with record(model) as rows:
    ...     _ = model(torch.ones(3, 4)), model(torch.ones(3, 4))
    >>> [(row.step, row.site, row.quantity) for row in rows]
    [(1, '1', 'distance_quadratic'), (2, '1', 'distance_quadratic')]
    """
    if every < 1:
        raise ValueError(f"every must be at least 1; got {every}")
    rows, clock = Rows(), _Clock(start, every)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, StatNorm)}
    handles: list[Any] = []
    if norms:
        handles += [model.register_forward_pre_hook(clock.tick), model.register_forward_hook(clock.rest)]
    for site, norm in norms.items():
        watcher = _Watcher(rows, clock, site, norm.spec)
        handles.append(norm.register_forward_pre_hook(watcher, with_kwargs=True))
    try:
        yield rows
    finally:
        for handle in handles:
            handle.remove()


class _Clock:
    """Counts the model's training forwards; `due` during those that are looked at."""

    def __init__(self, start: int, every: int):
        self.step, self.every, self.due = start, every, False

    def tick(self, model: nn.Module, args: tuple) -> None:
        if model.training:
            self.step += 1
            self.due = (self.step - 1) % self.every == 0

    def rest(self, model: nn.Module, args: tuple, output: object) -> None:
        self.due = False


class _Watcher:
    def __init__(self, rows: Rows, clock: _Clock, site: str, norm: str):
        self.rows, self.clock, self.site, self.norm = rows, clock, site, norm

    @torch.no_grad()
    def __call__(self, norm: StatNorm, args: tuple, kwargs: dict[str, Any]) -> None:
        if not (self.clock.due and norm.training):
            return
        x = kwargs["x"] if "x" in kwargs else args[0]
        mask = norm.check(x, kwargs.get("mask", args[1] if len(args) > 1 else None))
        wide = torch.promote_types(x.dtype, norm.running.dtype)
        batch, _ = channels.moments(norm.rest(x).to(wide), mask, norm.center)
        distances = torch.linalg.vector_norm(batch - norm.running, dim=1) / norm.dim
        self.rows.add(self.clock.step, self.site, self.norm, distances)
