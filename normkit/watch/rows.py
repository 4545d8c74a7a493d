"""Rows: what was recorded, one number each; in memory, and on the way to a file."""

import collections
import csv
import importlib.util
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """One number of one norm at one step."""

    step: int
    site: str
    norm: str
    quantity: str
    value: float


class Rows:
    """The rows recorded so far, oldest first; reading them is what waits for the device.

    A row's `step` counts the training forwards of the whole model, the first is 1; `site` is the norm's place in the
    model, "" for a number of the whole model; `norm` its spec, or the class name of a norm that is not ours.
    The newest `keep` rows are held. With `to`, a path, all of them are also appended to that CSV file as whole lines,
    now and then and at the end (or handed to it, where it is a function).
    """

    def __init__(self, keep: int = 200_000, to: "str | Path | Callable[[list[Row]], object] | None" = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 row; got {keep}")
        self.keep = keep
        self.refresh: Callable[[], None] = lambda: None
        self._read: collections.deque[Row] = collections.deque(maxlen=keep)
        self._waiting: collections.deque[tuple[int, str, str, tuple[str, ...], Tensor]] = collections.deque()
        self._count = 0  # rows waiting
        self._send = to if to is None or callable(to) else Appender(Path(to))

    def add(self, step: int, site: str, norm: str, names: tuple[str, ...], values: Tensor) -> None:
        """Note `values [len(names)]` without asking the device for them."""
        self._waiting.append((step, site, norm, names, values))
        self._count += len(names)
        if self._send is not None and self._count >= min(50_000, self.keep):  # some thousand steps
            self.take()
        while self._count > self.keep:
            self._count -= len(self._waiting.popleft()[3])

    def take(self) -> list[Row]:
        """The rows that nobody has read or written before; from now on they count as read."""
        self.refresh()
        new: list[Row] = []
        if self._waiting:
            flat = torch.cat([values for *_, values in self._waiting])
            numbers = iter(flat.tolist())
            for step, site, norm, names, _ in self._waiting:
                new += [Row(step, site, norm, name, next(numbers)) for name in names]
            self._waiting.clear()
            self._count = 0
        self._read.extend(new)
        if self._send is not None and new:
            self._send(new)
        return new

    def flush(self) -> None:
        """Bring the file up to date, where there is one."""
        self.refresh()
        if self._send is not None:
            self.take()

    def extend(self, rows: Iterable[Row]) -> None:
        """Take over rows of an earlier recording, which this one continues."""
        self._read.extend(rows)

    def save(self, path: str | Path) -> None:
        """Write the rows held to a .csv or .parquet file (the latter with pyarrow, if installed)."""
        write(path, self)

    def __iter__(self) -> Iterator[Row]:
        self.take()
        return iter(list(self._read))

    def __len__(self) -> int:
        self.take()
        return len(self._read)


class Appender:
    """Appends whole lines to a CSV file; its header comes first where the file is new."""

    def __init__(self, path: Path):
        if path.suffix != ".csv":
            raise ValueError(f"a file that grows is a .csv; got {path.name}. Rows.save writes .parquet at the end")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}; make it first")
        self.path = path

    def __call__(self, rows: list[Row]) -> None:
        """Append these."""
        fresh = not self.path.exists() or not self.path.stat().st_size
        with self.path.open("a", encoding="utf8", newline="") as file:
            file.write(text(rows, header=fresh))


def cut_or_begin(path: Path, size: int | None) -> None:
    """Take from a file what came after its first `size` bytes; a new one where there is none, or no size."""
    if size is None or not path.is_file():
        write(path, [])
    else:
        with path.open("r+b") as file:
            file.truncate(size)


def text(rows: Iterable[Row], header: bool = True) -> str:
    """Rows as CSV, values with six digits.

    >>> print(text([Row(1, "encoder.norm", "un", "rms", 0.5)]), end="")
    step,site,norm,quantity,value
    1,encoder.norm,un,rms,0.5
    """
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    if header:
        writer.writerow(Row._fields)
    writer.writerows((*row[:-1], f"{row.value:.6g}") for row in rows)
    return out.getvalue()


def write(path: str | Path, rows: Iterable[Row]) -> None:
    """Write rows to a .csv or .parquet file, whole or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    if path.suffix == ".csv":
        part.write_text(text(rows), encoding="utf8", newline="")
    elif path.suffix == ".parquet":
        table, parquet = _pyarrow()
        held = list(rows)
        parquet.write_table(table({name: [row[i] for row in held] for i, name in enumerate(Row._fields)}), part)
    else:
        raise ValueError(f"rows are written to .csv or .parquet; got {path.name}")
    part.replace(path)


def read(path: str | Path) -> list[Row]:
    """Rows of a .csv or .parquet file, or of the rows.csv or rows.parquet in a folder.

    A last line that is still being written is left out. ValueError, naming the file, where there are no rows to read.
    """
    path = Path(path)
    if path.is_dir():
        inside = [path / name for name in ("rows.csv", "rows.parquet") if (path / name).is_file()]
        if not inside:
            runs = sorted(str(run.parent) for name in ("rows.csv", "rows.parquet") for run in path.glob(f"*/{name}"))
            some = f"; there are some in {', '.join(runs[:5])}" if runs else "; record some with normkit.record"
            raise ValueError(f"{path} has no rows.csv and no rows.parquet{some}")
        path = inside[0]
    if not path.is_file():
        raise ValueError(f"there is no file of rows at {path}")
    try:
        return _read_parquet(path) if path.suffix == ".parquet" else _read_csv(path)
    except (OSError, UnicodeDecodeError, csv.Error, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is no file of rows ({', '.join(Row._fields)}): {error}") from None


def _read_csv(path: Path) -> list[Row]:
    with path.open(encoding="utf8", newline="") as file:
        whole = file.read()
    lines = whole.split("\n")[:-1]
    reader = csv.reader(lines, strict=True)
    if tuple(next(reader, ())) != Row._fields:
        raise ValueError(f"its first line is not {','.join(Row._fields)}")
    return [Row(int(step), site, norm, quantity, float(value)) for step, site, norm, quantity, value in reader]


def _read_parquet(path: Path) -> list[Row]:
    _, parquet = _pyarrow()
    columns: dict[str, Any] = parquet.read_table(path, columns=list(Row._fields)).to_pydict()
    return [Row(int(s), str(a), str(b), str(q), float(v)) for s, a, b, q, v in zip(*columns.values(), strict=True)]


def _pyarrow() -> tuple[Any, Any]:
    if importlib.util.find_spec("pyarrow") is None:
        raise ValueError("Parquet needs pyarrow: pip install pyarrow, or write a .csv file")
    import pyarrow
    import pyarrow.parquet

    return pyarrow.table, pyarrow.parquet
