"""Checks of arguments; errors give the argument, its value and what is allowed."""

import numbers
import os
from pathlib import Path
from typing import Any


def require(ok: bool, name: str, value: object, allowed: str) -> None:
    """Raise a ValueError with the given and the allowed value unless `ok`."""
    if not ok:
        raise ValueError(f"{name} must be {allowed}; got {value!r}")


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
        raise TypeError(f"{name} must be a path, a string or pathlib.Path; got {path!r}")
    return Path(path)
