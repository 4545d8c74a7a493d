"""Rows of tables by name; errors for unknown names propose the nearest."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Row = TypeVar("Row")


def pick(table: Mapping[str, Row], name: str, kind: str) -> Row:
    """Return the row of a table called `name`.

    Raises:
        ValueError: if there is none; see `unknown`.

    >>> pick({"layer": 1}, "layer", "norm")
    1
    """
    if name not in table:
        raise unknown(table, name, kind)
    return table[name]


def unknown(known: Iterable[str], name: str, kind: str, more: str = "") -> ValueError:
    """Return the error for an unknown name, with the known ones, the nearest and `more`.

    >>> print(unknown(["layer", "rms"], "laier", "norm"))
    there is no norm named 'laier' (did you mean 'layer'?); there are layer, rms
    """
    known = list(known)
    close = [each for each in known if name and each.startswith(name)] or difflib.get_close_matches(name, known, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    return ValueError(f"there is no {kind} named {name!r}{hint}; there are {', '.join(known)}{more}")
