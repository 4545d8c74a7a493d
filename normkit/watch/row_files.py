"""Files of recorded rows: the format, its reader and its writer."""

import csv
import io
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from normkit._util import as_path, open_regular, require, write_whole
from normkit.watch.recording import Recording, Row, checked_rows
from normkit.watch.row_names import current_name

FILE = "rows.csv"
TAIL = 64  # bytes before the position reached, by which a file that has grown is recognised
HEAD = ",".join(Row._fields)


class Appender:
    """Appends rows to a CSV file as whole lines, after a header if the file is new."""

    def __init__(self, path: str | Path):
        path = as_path(path, "to")
        if path.suffix != ".csv":
            raise ValueError(f"a file that grows is a .csv; got {path.name}. Rows.save writes .parquet at the end")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent} for {path.name}; make it first")
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no file; name a file for the rows")
        self.path = path.absolute()  # the program may change its folder
        self.is_whole = False
        if self._size():
            with open_regular(path) as file:
                if not file.readline().decode("utf8", "replace").startswith(HEAD):
                    raise ValueError(f"{path} is no file of rows ({HEAD}); name another file")

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def __call__(self, rows: Iterable[Row]) -> None:
        """Append these rows, or none of them."""
        if not self.is_whole:  # a program that was killed may have left half a line
            truncate_file(self.path, self._size())
            self.is_whole = True
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


def drop_after(path: Path, step: int) -> None:
    """Drop rows after a step from a file; a run that goes on there records them again."""
    rows = read(path) if path.is_file() and path.stat().st_size else []
    if any(row.step > step for row in rows):
        write(path, (row for row in rows if row.step <= step))


def to_csv(rows: Iterable[Row], header: bool = True) -> str:
    """Format rows as CSV, values with six digits.

    >>> print(to_csv([Row(1, "encoder.norm", "un", "rms", 0.5)]), end="")
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
    """Write rows to a .csv or .parquet file, which is replaced as a whole.

    Raises:
        ValueError: for another kind of file, or for Parquet without pyarrow.
    """
    path, rows = as_path(path, "path"), checked_rows(rows)
    if path.suffix == ".csv":
        data = to_csv(rows).encode()
    elif path.suffix == ".parquet":
        pyarrow, buffer, held = _pyarrow(), io.BytesIO(), list(rows)
        columns = {name: [row[i] for row in held] for i, name in enumerate(Row._fields)}
        pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
        data = buffer.getvalue()
    else:
        raise ValueError(f"rows are written to .csv or .parquet; got {path.name}")
    write_whole(path, data)


def read(path: str | Path) -> list[Row]:
    """Read rows from a .csv or .parquet file, or from such a file in a run folder.

    A last line without its line end is still being written, and is left out.

    Raises:
        ValueError: if there is no such file, or it holds anything but rows; the message names it.
    """
    path = as_path(path, "path")
    if path.is_dir():
        names = (FILE, "rows.parquet")
        inside = [path / name for name in names if (path / name).is_file()]
        if not inside:
            runs = sorted(str(run.parent) for name in names for run in path.glob(f"*/{name}"))
            hint = f"; there are some in {', '.join(runs[:5])}" if runs else "; record some with normkit.record"
            raise ValueError(f"{path} has no rows.csv and no rows.parquet{hint}")
        path = inside[0]
    if not path.is_file():
        raise ValueError(f"there is no file of rows at {path}")
    try:
        if path.suffix == ".parquet":
            return _read_parquet(path)
        with open_regular(path) as file:
            return list(_parse(file.read(), header=True))
    except (OSError, csv.Error, ValueError, TypeError, KeyError) as error:
        raise _unreadable(path, error) from None


class RunReader:
    """Reads the rows.csv of run folders, of a file that has grown only what is new.

    Where the size or the bytes that were read last differ, the file was started again and is read from its beginning.
    """

    def __init__(self) -> None:
        self._read: dict[Path, tuple[int, bytes, Recording]] = {}  # position, the bytes before it, values so far

    def read(self, folder: str | Path) -> Recording:
        """Read what a run has recorded so far; an empty recording if the folder has no rows.csv.

        Raises:
            ValueError: if the file holds anything but rows; the message names it.
        """
        path = as_path(folder, "folder") / FILE
        try:
            with open_regular(path) as file:
                position, before, found = self._read.get(path, (0, b"", Recording()))
                file.seek(position - len(before))
                if file.read(len(before)) != before:
                    position, before, found = 0, b"", Recording()
                    file.seek(0)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            if new:
                found.add(_parse(new, header=not position))
            self._read[path] = position + len(new), (before + new)[-TAIL:], found
        except FileNotFoundError:
            return Recording()
        except (TypeError, csv.Error, ValueError) as error:
            self._read.pop(path, None)  # some of its rows may have been added
            raise _unreadable(path, error) from None
        return found


def read_run(folder: str | Path) -> Recording:
    """Read what the run in an existing folder has recorded; see `RunReader`."""
    require(as_path(folder, "folder").is_dir(), "folder", str(folder), "a folder that exists, that of a run")
    return RunReader().read(folder)


def _parse(data: bytes, header: bool) -> Iterator[Row]:
    """Yield the rows of the whole lines, after a header if there has to be one."""
    reader = csv.reader(data.decode("utf8").split("\n")[:-1], strict=True)
    if header and tuple(next(reader, ())) != Row._fields:
        raise ValueError(f"its first line is not {HEAD}")
    for step, site, norm, quantity, value in reader:
        yield Row(int(step), site, norm, current_name(quantity), float(value))


def _unreadable(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path} is cut short or no file of rows ({HEAD}): {error}")


def _read_parquet(path: Path) -> list[Row]:
    columns: dict[str, Any] = _pyarrow().parquet.read_table(path, columns=list(Row._fields)).to_pydict()
    rows = zip(*columns.values(), strict=True)
    return [Row(int(s), str(a), str(b), current_name(str(q)), float(v)) for s, a, b, q, v in rows]


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError("Parquet needs pyarrow: pip install pyarrow, or write a .csv file") from None
    return pyarrow
