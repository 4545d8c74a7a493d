"""The store of rows that a recorder fills."""

import collections
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from normkit._util import is_int, require
from normkit.watch.recording import Row
from normkit.watch.row_files import Appender, write

Sink = str | Path | Callable[[list[Row]], object] | None  # for rows: a CSV file, a function that takes them, or none


class Waiting(NamedTuple):
    """Numbers of one norm at one step that are still on the device."""

    step: int
    site: str
    norm: str
    names: list[str]
    values: Tensor  # [len(names)]


class Rows:
    """The rows recorded so far, oldest first; only reading them waits for the device.

    A row's `step` counts the training forwards of the whole model from 1. `site` is the norm's place in the model, ""
    for a number of the whole model. `norm` is its spec, or the class name of a norm that is not normkit's.

    Args:
        keep: Number of rows held, the newest ones; bounds the memory.
        to: CSV file to which whole lines are appended, each 50,000 rows and at the end; or a function that takes them.
    """

    def __init__(self, keep: int = 200_000, to: Sink = None) -> None:
        require(is_int(keep) and keep >= 1, "keep", keep, "a whole number of at least 1")
        self.keep = keep
        self.refresh: Callable[[], None] = lambda: None
        self._held: collections.deque[Row] = collections.deque(maxlen=keep)
        self._waiting: collections.deque[Waiting] = collections.deque()
        self._count = 0  # rows waiting
        self._send = to if to is None or callable(to) else Appender(to)

    def add(self, new: Waiting) -> None:
        """Add numbers without waiting for the device."""
        self._waiting.append(new)
        self._count += len(new.names)
        if self._send is not None and self._count >= min(50_000, self.keep):  # some thousand steps
            self.take()
        while self._count > self.keep:
            self._count -= len(self._waiting.popleft().names)

    def take(self) -> list[Row]:
        """Return the rows added since the last read or write."""
        self.refresh()
        new: list[Row] = []
        if self._waiting:
            first = self._waiting[0].values.device  # of a model on several
            numbers = iter(torch.cat([entry.values.to(first) for entry in self._waiting]).tolist())
            for step, site, norm, names, _ in self._waiting:
                new += [Row(step, site, norm, name, next(numbers)) for name in names]
            self._waiting.clear()
            self._count = 0
        self._held.extend(new)
        if self._send is not None and new:
            self._send(new)
        return new

    def flush(self) -> None:
        """Bring the file up to date, if there is one."""
        if self._send is not None:
            self.take()

    def save(self, path: str | Path) -> None:
        """Write the rows held to a .csv or .parquet file; the latter needs pyarrow."""
        write(path, self)

    def __iter__(self) -> Iterator[Row]:
        self.take()
        return iter(list(self._held))

    def __len__(self) -> int:
        self.take()
        return len(self._held)
