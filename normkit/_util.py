"""Helpers of all packages: checks of arguments, look-up by name, whole writes of files, aligned text."""

import contextlib
import difflib
import numbers
import os
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Row = TypeVar("Row")

MANY = 20  # names; of more, an error that proposes one lists only some
JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"  # several scripts cannot be written without them


def warn(message: str) -> None:
    """Warn at the line of the user's code, past the frames of normkit and PyTorch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in ("normkit", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ValueError with the given and the allowed value unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {allowed}; got {_short(value)}")


def _short(value: object) -> str:
    shape = getattr(value, "shape", None)  # of a tensor or an array
    return repr(value) if shape is None else f"{type(value).__name__} {getattr(value, 'dtype', '')} {tuple(shape)}"


def require_functions(**given: object) -> None:
    """Raise a ValueError for an argument that is neither a function nor None."""
    for name, value in given.items():
        require(value is None or callable(value), name, value, "a function or None")


def require_flags(**given: object) -> None:
    """Raise a ValueError for an argument that is not True or False."""
    for name, value in given.items():
        require(isinstance(value, bool), name, value, "True or False")


def is_int(value: object) -> bool:
    """Return True for whole numbers; True and False are none."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return True for numbers; True and False are none."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Convert numbers of NumPy and other libraries to int or float, which a spec can hold."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def as_path(path: str | os.PathLike[str], name: str) -> Path:
    """Return the path of an argument called `name`; a TypeError for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{name} must be a path, a string or pathlib.Path; got {_short(path)}")
    return Path(path)


def pick(table: Mapping[str, Row], name: str, kind: str) -> Row:
    """Return the row of a table called `name`.

    Raises:
        ValueError: if there is none; see `unknown`.
        TypeError: if the name is no string.

    >>> pick({"layer": 1}, "layer", "norm")
    1
    """
    if not isinstance(name, str):
        raise TypeError(f"a {kind} is chosen by its name, a string; got {name!r}")
    if name not in table:
        raise unknown(table, name, kind)
    return table[name]


def unknown(known: Iterable[str], name: str, kind: str, more: str = "") -> ValueError:
    """Return the error for an unknown name, with the known ones, the nearest and `more`.

    Of many known names only those near the given one are listed, if there is one.

    >>> print(unknown(["layer", "rms"], "laier", "norm"))
    there is no norm named 'laier' (did you mean 'layer'?); there are layer, rms
    >>> print(unknown(["renorm", "rms"], "RMSNorm", "norm"))
    there is no norm named 'RMSNorm' (did you mean 'rms'?); there are renorm, rms
    >>> print(unknown([f"table{n}" for n in range(40)], "tabel7", "study"))
    there is no study named 'tabel7' (did you mean 'table7'?); there are 40, such as table7, table37, table27
    """
    known = list(known)
    key, lower = name.lower(), {each.lower(): each for each in known}
    longer = [each for each in lower if key and each.startswith(key)]
    shorter = sorted((each for each in lower if len(each) > 2 and key.startswith(each)), key=len, reverse=True)
    close = longer or shorter or difflib.get_close_matches(key, lower, n=1)
    hint = f" (did you mean {lower[close[0]]!r}?)" if close else ""
    listed = ", ".join(f"{each!r}" if "," in each else each for each in known)
    if close and len(known) > MANY:
        near = [lower[each] for each in difflib.get_close_matches(key, lower, n=3, cutoff=0)]
        listed = f"{len(known)}, such as {', '.join(near)}"
    return ValueError(f"there is no {kind} named {name!r}{hint}; there are {listed}{more}")


def cache_folder() -> Path:
    """Return the cache folder: `NORMKIT_CACHE`, or `~/.cache/normkit`.

    Raises:
        OSError: If there is neither, as for a user without a home.
    """
    try:
        return Path(os.environ.get("NORMKIT_CACHE") or Path.home() / ".cache" / "normkit")
    except RuntimeError:  # HOME is not set and the system does not know the user, as in some containers
        raise OSError("there is no home folder for the cache; set HOME, or NORMKIT_CACHE to a folder") from None


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file atomically: after a crash `path` holds all old bytes or all new ones.

    Raises:
        OSError: if the file cannot be written (no space left, no permission); the old one is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.{os.getpid()}")  # containers have equal numbers
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    with contextlib.suppress(OSError):  # where the system can do it, the new name survives a power cut, too
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    return path


def escape(text: str, keep: str = "") -> str:
    r"""Escape characters that are not printable, such as those that control a terminal.

    Names, symbols and messages that come from a file pass through here before they are printed.

    Args:
        text: Any text.
        keep: Further characters to leave as they are, such as a line end.

    >>> print(escape("un\x1b[31m"))
    un\x1b[31m
    """
    return "".join(
        c if c.isprintable() or c in JOINERS or c in keep else c.encode("unicode_escape").decode() for c in text
    )


def align(lines: Sequence[Sequence[str]], right: Collection[int] = (), heads: int = 0) -> str:
    """Align the cells of lines in columns, two spaces apart.

    Args:
        lines: The cells of each line; all lines have the same number of cells.
        right: Numbers of the columns that are aligned to the right, as numbers are.
        heads: Number of lines at the top that a rule separates from the others; 0 draws no rule.

    >>> print(align([["norm", "PER"], ["un", "10.2"]], right=[1], heads=1))
    norm   PER
    ----------
    un    10.2
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            cell.rjust(width) if place in right else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    if heads:
        aligned.insert(heads, "-" * max(map(len, aligned)))
    return "\n".join(aligned)


def narrow(lines: Sequence[Sequence[str]], most: int) -> list[list[list[str]]]:
    """Split a wide table into narrower ones, each with the first column.

    >>> narrow([["norm", "PER", "loss"], ["un", "9.5", "0.31"]], 12)
    [[['norm', 'PER'], ['un', '9.5']], [['norm', 'loss'], ['un', '0.31']]]
    """
    widths = [max(map(len, column)) + 2 for column in zip(*lines, strict=True)]
    parts = [[0]]
    for column in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[each] for each in [*parts[-1], column]) - 2 > most:
            parts.append([0])
        parts[-1].append(column)
    return [[[line[column] for column in part] for line in lines] for part in parts]


def truncate(names: Sequence[str], most: int = 6) -> list[str]:
    """The first names of a list and the number of the others.

    A single name that would be left out is listed instead.

    >>> truncate(["a"] * 9)[-2:]
    ['a', '3 more']
    """
    return list(names) if len(names) <= most + 1 else [*names[:most], f"{len(names) - most} more"]


def unique(names: Iterable[str]) -> tuple[str, ...]:
    """Each name once, in order."""
    return tuple(dict.fromkeys(names))


def listed(names: Iterable[str], most: int = 3) -> str:
    """List the first few names in a model, each once, and the number of the others.

    >>> listed(["a", "b", "a", "c"], most=2)
    'a, b and 1 more'
    """
    names = unique(name or "(the model itself)" for name in names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def format_spec(name: str, options: Mapping[str, object]) -> str:
    """The spec of a norm, from its name and options.

    >>> format_spec("un", {"window": 2}), format_spec("layer", {})
    ('un(window=2)', 'layer')
    """
    return name + (f"({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else "")
