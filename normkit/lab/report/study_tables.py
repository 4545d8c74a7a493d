"""Tables that `normkit study` writes: printed numbers beside those of our runs."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from normkit.lab.report.results import NUMBER, Maybe, check

SCHEMA = 1
SHAPE: dict[str, Any] = {
    "schema": int,
    "study": str,
    "title": str,
    "source": str,
    "claim": str,
    "note": str,
    "scale": str,
    "columns": [{"title": str, "about": str, "digits": int}],
    "rows": [
        {
            "label": str,
            "cells": [{"printed": Maybe(str), "n": int, "mean": Maybe(NUMBER), "spread": Maybe(NUMBER)}],
        }
    ],
}


def find(paths: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Read the tables in folders named `tables` below these paths; ValueError for a bad one."""
    return [read(file) for path in map(Path, paths) if path.is_dir() for file in sorted(path.rglob("tables/*.json"))]


def read(file: Path) -> dict[str, Any]:
    """Read the table in a file; ValueError if it is none."""
    try:
        table = json.loads(file.read_text(encoding="utf8"))
        check(table, SHAPE, "")
        if table["schema"] != SCHEMA:
            raise ValueError(f"it has schema {table['schema']}; this version of normkit reads {SCHEMA}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no table of a study: {error}") from None
    return table


def shown(table: Mapping[str, Any]) -> dict[str, Any]:
    """Format the cells of a table: the printed number, and mean and spread of our runs.

    >>> cell = {"printed": "35.9", "n": 2, "mean": 31.22, "spread": 0.14}
    >>> shown({"columns": [{"digits": 1}], "rows": [{"label": "PN", "cells": [cell]}]})["rows"]
    [{'label': 'PN', 'cells': [{'printed': '35.9', 'ours': '31.2 \u00b1 0.1 (2)'}]}]
    """
    rows = []
    for row in table["rows"]:
        pairs = zip(row["cells"], table["columns"], strict=False)
        cells = [{"printed": cell["printed"] or "-", "ours": _ours(cell, column["digits"])} for cell, column in pairs]
        rows.append({"label": row["label"], "cells": cells})
    return {**table, "rows": rows}


def _ours(cell: Mapping[str, Any], digits: int) -> str:
    if not cell["n"] or cell["mean"] is None:
        return "not yet run"
    digits = min(max(digits, 0), 6)
    spread = "" if cell["spread"] is None else f" \u00b1 {cell['spread']:,.{digits}f}"
    return f"{cell['mean']:,.{digits}f}{spread} ({cell['n']})"
