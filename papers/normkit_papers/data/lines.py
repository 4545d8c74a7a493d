"""Lines of text files, plain or compressed, one at a time; errors name the line."""

import gzip
import lzma
import zlib
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO

SUFFIXES = ("", ".xz", ".gz")


def find_file(path: str | Path) -> Path | None:
    """Return the file at `path`, or `path.xz` or `path.gz`; None if there is none."""
    candidates = [Path(f"{path}{suffix}") for suffix in SUFFIXES]
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def open_bytes(path: str | Path) -> BinaryIO:
    """Open a file, decompressed if its suffix is `.xz` or `.gz`."""
    path = Path(path)
    if path.suffix == ".xz":
        return lzma.open(path, "rb")  # type: ignore[return-value]
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def read_lines(path: str | Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file.

    Only line feeds end lines; a byte order mark is dropped.

    Raises:
        ValueError: If a line is not UTF-8 or has a byte 0 (UTF-16, damage), or a compressed file is cut short.
    """
    number = 0
    try:
        with open_bytes(path) as file:
            for number, raw in enumerate(file, 1):
                if b"\0" in raw:
                    raise ValueError(
                        f"{path} is not UTF-8 text: line {number} has a byte 0; where it is UTF-16, convert it, "
                        "as with `iconv -f utf16 -t utf8`, else it is damaged: get it again"
                    )
                text = raw.removesuffix(b"\n").removesuffix(b"\r").decode("utf8")
                yield text.removeprefix("\ufeff") if number == 1 else text
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start} of line {number}; "
            "convert it, as with `iconv -f latin1 -t utf8`"
        ) from None
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is cut short or damaged after line {number}: {error}; get it again") from None


def read_pairs(source: str | Path, target: str | Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of two files in pairs, with single spaces between words.

    Raises:
        ValueError: If one file has more lines than the other, or a line is blank on one side.
    """
    number = 0
    both = zip_longest(read_lines(source), read_lines(target))
    for number, (first, second) in enumerate(both, 1):
        if first is None or second is None:
            short, long = (source, target) if first is None else (target, source)
            more = number + sum(1 for _ in both)
            raise ValueError(f"{short} is misaligned with {long}: {number - 1:,} lines against {more:,}; needs as many")
        yield _filled(first, second, source if not first.strip() else target, number)
    if not number:
        raise ValueError(f"{source} is empty; needs at least one line")


def read_columns(path: str | Path, source: int, target: int) -> Iterator[tuple[str, str]]:
    """Yield two tab-separated columns of a file, counted from 0; otherwise as `read_pairs`."""
    number = 0
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) <= max(source, target):
            raise ValueError(
                f"line {number} of {path} has {len(columns)} columns between tabs; needs {max(source, target) + 1}"
            )
        yield _filled(columns[source], columns[target], path, number)
    if not number:
        raise ValueError(f"{path} is empty; needs at least one line")


def _filled(first: str, second: str, where: str | Path, number: int) -> tuple[str, str]:
    one, two = " ".join(first.split()), " ".join(second.split())
    if not one or not two:
        raise ValueError(f"line {number} of {where} is empty on one side; drop it from both sides")
    return one, two
