"""Rows of tables by name; errors for unknown names propose the nearest."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

Row = TypeVar("Row")

MANY = 20  # names; of more, an error that proposes one lists only some


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
    listed = ", ".join(known)
    if close and len(known) > MANY:
        near = [lower[each] for each in difflib.get_close_matches(key, lower, n=3, cutoff=0)]
        listed = f"{len(known)}, such as {', '.join(near)}"
    return ValueError(f"there is no {kind} named {name!r}{hint}; there are {listed}{more}")
