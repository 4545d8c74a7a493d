"""Find the files of data sets, and read their lines, plain or compressed.

`NORMKIT_DATA` lists folders (separated by colons, on Windows semicolons) that contain a folder for each data set.
"""

import contextlib
import functools
import gzip
import importlib.resources
import io
import lzma
import os
import tarfile
import tomllib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, Literal

from normkit._util import unknown

VARIABLE = "NORMKIT_DATA"


@functools.cache
def table(kind: Literal["text", "images", "detection"]) -> dict[str, dict[str, Any]]:
    """Return the rows of a kind of data in `corpora.toml`, by name."""
    text = importlib.resources.files("normkit_papers.data").joinpath("corpora.toml").read_text(encoding="utf8")
    return {name: {"name": name, **row} for name, row in tomllib.loads(text)[kind].items()}


def find(name: str, rows: Mapping[str, Any], what: str, lacking: Callable[[Any, Path], list[str]]) -> tuple[Any, Path]:
    """Return the row of a data set, or None, and its folder, which `NORMKIT_DATA` lists.

    `what` is what the table lists, for error messages; `lacking` returns the files of a row that a folder lacks.

    Raises:
        ValueError: If there is no such row and no such folder, or files are missing; then with their source.
    """
    if name not in rows:
        if not Path(name).is_dir():
            raise unknown(rows, name, what, ", or name a folder")
        return None, Path(name).absolute()  # "." has no name
    row, roots = rows[name], [Path(root) for root in os.environ.get(VARIABLE, "").split(os.pathsep) if root]
    folders = [root / each for root in roots for each in (name, *row.folders)]
    missing = {folder: lacking(row, folder) for folder in folders if folder.is_dir()}
    for folder, files in missing.items():
        if not files:
            return row, folder
    where = f"{VARIABLE} is not set; set it to a folder that holds {(*row.folders, name)[0]}/"
    if missing:
        nearest = min(missing, key=lambda folder: len(missing[folder]))
        where = f"{nearest} lacks {', '.join(missing[nearest])}"
    elif folders:
        where = f"there is no folder {' or '.join(map(str, folders))}"
    raise ValueError(f"the data set {name} is not here: {where}. Get it from {row.origin}")


def find_file(path: str | Path) -> Path | None:
    """Return the file at `path`, or `path.xz` or `path.gz`; None if there is none."""
    candidates = [Path(f"{path}{suffix}") for suffix in ("", ".xz", ".gz")]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def open_bytes(path: Path) -> BinaryIO:
    """Open a file, decompressed if its suffix is `.xz` or `.gz`."""
    opener = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
    return opener(path, "rb")  # type: ignore[return-value]


@contextlib.contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Raise a ValueError with the file's name if the block finds the file damaged."""
    try:
        yield
    except KeyError as error:
        raise ValueError(f"{path} cannot be read: it lacks {error}, or names it without listing it") from None
    except (
        EOFError, ValueError, TypeError, gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zlib.error, RecursionError
    ) as error:  # fmt: skip
        raise ValueError(f"{path} cannot be read: {error}; repair it or get it again") from None


def read_lines(path: Path) -> Iterator[str]:
    r"""Yield the lines of a UTF-8 file; only "\n" and "\r\n" end lines, and a byte order mark is dropped.

    Raises:
        ValueError: If a line is not UTF-8 or has a byte 0 (UTF-16), or the file is damaged.
    """
    with undamaged(path), io.TextIOWrapper(open_bytes(path), "utf-8-sig", newline="\n") as file:
        for number, text in enumerate(file, 1):
            if "\0" in text:
                raise ValueError(f"line {number} has a byte 0, so it is UTF-16 or damaged; convert it to UTF-8")
            yield text.removesuffix("\n").removesuffix("\r")


def read_pairs(paths: Sequence[Path], columns: Sequence[int] = ()) -> Iterator[tuple[str, ...]]:
    """Yield pairs of text: of two files, or of two `columns` of a table with tabs.

    Raises:
        ValueError: If one file has more lines than the other, or a line lacks a column or is blank.
    """
    for number, lines in enumerate(zip_longest(*map(read_lines, paths)), 1):
        if None in lines:
            raise ValueError(
                f"{paths[lines.index(None)]} ends at line {number - 1:,}, before {paths[lines.index(None) - 1]}; both "
                "need as many lines"
            )
        cells = lines[0].split("\t") if columns else lines
        if len(cells) <= max(columns, default=0):
            raise ValueError(f"line {number} of {paths[0]} has {len(cells)} columns; needs {max(columns) + 1}")
        pair = tuple(" ".join(cells[column].split()) for column in columns or (0, 1))
        if "" in pair:
            path = paths[0 if columns else pair.index("")]
            raise ValueError(f"line {number} of {path} is blank; drop it from both sides")
        yield pair
