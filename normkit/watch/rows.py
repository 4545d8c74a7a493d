"""Rows of recorded numbers: collected from the device, as series over the steps, and in CSV files."""

import collections
import csv
import io
import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from normkit._util import as_path, is_int, require, write_whole


class Row(NamedTuple):
    """One number of one norm at one step."""

    step: int
    site: str
    norm: str
    quantity: str
    value: float


FILE = "rows.csv"
HEAD = ",".join(Row._fields)
Sink = str | Path | Callable[[list[Row]], object] | None  # for rows: a CSV file, a function that takes them, or none


# -- while a model trains ---------------------------------------------------------------------------------------------


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
        keep: Number of rows held, the newest ones; bounds the memory. Those of the whole model, such as its loss, are
            kept beyond it, as a run is judged by its start, too.
        to: CSV file to which whole lines are appended, each 50,000 rows and at the end; or a function that takes them.
    """

    def __init__(self, keep: int = 200_000, to: Sink = None) -> None:
        require(is_int(keep) and keep >= 1, "keep", keep, "a whole number of at least 1")
        self.keep = keep
        self.refresh: Callable[[], None] = lambda: None
        self._held: collections.deque[Row] = collections.deque(maxlen=keep)
        self._older: list[Row] = []  # of the whole model
        self._whole: list[Waiting] = []  # the same
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
            self._count -= len((old := self._waiting.popleft()).names)
            self._whole += [] if old.site else [old]

    def take(self) -> None:
        """Copy the numbers from the device, and send them to the file or function, if any."""
        self.refresh()
        waiting = [*self._whole, *self._waiting]
        if not waiting:
            return
        first = waiting[0].values.device  # of a model on several
        numbers = iter(torch.cat([entry.values.to(first) for entry in waiting]).tolist())
        new = [Row(*entry[:3], name, next(numbers)) for entry in waiting for name in entry.names]
        self._waiting.clear()
        self._whole.clear()
        self._count = 0
        old = max(0, len(self._held) + len(new) - self.keep)
        self._older += [row for row in itertools.islice(itertools.chain(self._held, new), old) if not row.site]
        self._held.extend(new)
        if self._send is not None:
            self._send(new)

    def flush(self) -> None:
        """Bring the file up to date, if there is one."""
        if self._send is not None:
            self.take()

    def __iter__(self) -> Iterator[Row]:
        self.take()
        return iter([*self._older, *self._held])

    def __len__(self) -> int:
        self.take()
        return len(self._older) + len(self._held)


# -- in memory --------------------------------------------------------------------------------------------------------


class Series(NamedTuple):
    """One quantity of one norm over the steps; values may be nan or infinite."""

    norm: str
    steps: list[int]
    values: list[float]

    def points(self) -> list[tuple[int, float]]:
        """Steps and finite values, in the order of the steps."""
        pairs = zip(self.steps, self.values, strict=True)
        return sorted((step, value) for step, value in pairs if math.isfinite(value))

    def late(self) -> list[float]:
        """Finite values of the second half of the steps."""
        middle = (self.steps[0] + self.steps[-1]) / 2
        return [value for step, value in self.points() if step >= middle]

    def middle(self) -> float:
        """Median of the late values; nan without one."""
        late = self.late()
        return statistics.median(late) if late else math.nan

    def top(self) -> float:
        """The largest finite value of all steps; nan without one."""
        return max((value for value in self.values if math.isfinite(value)), default=math.nan)

    def last(self) -> float:
        """The value of the last step."""
        return self.values[-1]


class Recording:
    """Recorded values of a run, as series by quantity and site.

    Attributes:
        sites: The norm at each site, in the order of the model; "" for what is no norm, such as the whole model.
        quantities: The series of each quantity by site, in the order in which they were recorded.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.sites: dict[str, str] = {}
        self.quantities: dict[str, dict[str, Series]] = {}
        for row in checked_rows(rows):
            series = self.quantities.setdefault(row.quantity, {})
            if row.site not in series:
                series[row.site] = Series(row.norm, [], [])
                self.sites.setdefault(row.site, row.norm)
            series[row.site].steps.append(row.step)
            series[row.site].values.append(row.value)

    def of(self, quantity: str) -> dict[str, Series]:
        """Series of a quantity by site in the model's order; backward passes record in reverse."""
        found = self.quantities.get(quantity, {})
        return {site: found[site] for site in self.sites if site in found}

    def norms(self) -> dict[str, str]:
        """The norm at each site that has one."""
        return {site: norm for site, norm in self.sites.items() if norm}

    def middle(self, quantity: str, site: str) -> float:
        """Late median of a quantity at a site; nan if it was not recorded."""
        series = self.quantities.get(quantity, {}).get(site)
        return math.nan if series is None else series.middle()

    def last_step(self) -> int:
        """The last step with a value; 0 without any."""
        return max((s.steps[-1] for series in self.quantities.values() for s in series.values()), default=0)


def checked_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows; a TypeError for anything else."""
    for row in rows if isinstance(rows, Iterable) else [rows]:
        if not isinstance(row, Row):
            given = type(row).__name__
            raise TypeError(f"a recording consists of rows, as of `with normkit.record(model) as rows`; got {given}")
        yield row


# -- in files ---------------------------------------------------------------------------------------------------------


class Appender:
    """Appends rows to a CSV file as whole lines, after a header if the file is new."""

    def __init__(self, path: str | Path):
        path = _csv(path, "to")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}; make it first")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file; name a file for the rows")
        self.path = path.absolute()  # the program may change its folder
        self.path.open("ab").close()  # an OSError now, not after the training
        if self._size():
            with path.open("rb") as file:
                if not file.readline().decode("utf8", "replace").startswith(HEAD):
                    raise ValueError(f"{path} is no file of rows ({HEAD}); name another file")

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def __call__(self, rows: Iterable[Row]) -> None:
        """Append these rows, or none of them."""
        size = self._size()
        try:
            with self.path.open("a", encoding="utf8", newline="") as file:
                file.write(to_csv(rows, header=not size))
        except BaseException:
            if self.path.exists():
                truncate_file(self.path, size)
            raise


def truncate_file(path: Path, size: int | None) -> None:
    """Cut a file of rows to whole lines within `size` bytes; None or no file: an empty one."""
    if size is None or not path.is_file():
        write(path, [])
    else:
        with path.open("r+b") as file:
            file.truncate(file.read(size).rfind(b"\n") + 1)  # after a power cut it may be shorter


def to_csv(rows: Iterable[Row], header: bool = True) -> str:
    """Format rows as CSV, values with six digits."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    if header:
        writer.writerow(Row._fields)
    writer.writerows((*row[:-1], f"{row.value:.6g}") for row in rows)
    return out.getvalue()


def write(path: str | Path, rows: Iterable[Row]) -> None:
    """Write rows to a .csv file, which is replaced as a whole.

    Raises:
        ValueError: for another kind of file.
    """
    write_whole(_csv(path, "path"), to_csv(checked_rows(rows)).encode())


def read(path: str | Path) -> list[Row]:
    """Read rows from a .csv file, or from the rows.csv of a run folder.

    A last line without its line end is still being written, and is left out.

    Raises:
        ValueError: if there is no such file, or it holds anything but rows; the message names it.
    """
    path = as_path(path, "path")
    path = path / FILE if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"there is no file of rows at {path}; record some with normkit.record")
    try:
        head, *lines = csv.reader(path.read_bytes().decode("utf8").split("\n")[:-1] or [""], strict=True)
        if tuple(head) != Row._fields:
            raise ValueError(f"its first line is not {HEAD}")
        return [Row(int(step), site, norm, quantity, float(value)) for step, site, norm, quantity, value in lines]
    except (csv.Error, OSError, ValueError) as error:
        raise ValueError(f"{path} is cut short or no file of rows ({HEAD}): {error}") from None


def read_run(folder: str | Path) -> Recording:
    """Read what the run in an existing folder has recorded; empty if it has no rows.csv."""
    folder = as_path(folder, "folder")
    require(folder.is_dir(), "folder", str(folder), "a folder that exists, that of a run")
    path = folder / FILE
    return Recording(read(path) if path.is_file() and path.stat().st_size else ())


def _csv(path: str | Path, name: str) -> Path:
    path = as_path(path, name)
    require(path.suffix == ".csv", name, path.name, "a .csv file")
    return path
