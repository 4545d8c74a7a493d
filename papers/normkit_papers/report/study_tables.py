"""Tables that `normkit study` writes: printed numbers beside those of our runs."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from normkit._util import escape
from normkit_papers.report.results import NUMBER, Maybe, check

SCHEMA = 1
CELL: dict[str, Any] = {
    "printed": Maybe(str), "ours": bool, "runs": [{"status": str}], "n": int, "mean": Maybe(NUMBER),
    "spread": Maybe(NUMBER),
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "schema": int,
    "study": str,
    "title": str,
    "source": str,
    "claim": str,
    "note": str,
    "scale": str,
    "columns": [{"title": str, "about": str, "digits": int}],
    "rows": [{"label": str, "cells": [CELL]}],
}
NOT_YET = "not yet run"
NONE = "-"


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
    """Format the cells of a table: the printed number, and ours."""
    rows = [
        {"label": row["label"], "cells": [
            {"printed": cell["printed"] or NONE, "ours": cell_text(cell, column["digits"])}
            for cell, column in zip(row["cells"], table["columns"], strict=False)
        ]} for row in table["rows"]
    ]  # fmt: skip
    return {**table, "rows": rows}


def cell_text(cell: Mapping[str, Any], digits: int) -> str:
    """Format our figure: mean ± sample standard deviation (n), and runs that did not finish.

    >>> run = {"seed": 0, "status": "diverged at step 7", "value": None}
    >>> cell_text({"ours": True, "runs": [run], "n": 0, "mean": None, "spread": None}, 1)
    'diverged at step 7'
    """
    if not cell["ours"]:
        return NONE
    if not cell["runs"]:
        return NOT_YET
    parts, digits = [], min(max(digits, 0), 6)
    if cell["mean"] is not None:
        spread = "" if cell["spread"] is None else f" ± {cell['spread']:,.{digits}f}"
        parts.append(f"{cell['mean']:,.{digits}f}{spread} ({cell['n']})")
    bad = [escape(run["status"].split(": ")[0]) for run in cell["runs"] if run["status"] != "done"]
    if bad:
        parts.append(bad[0] if len(cell["runs"]) == 1 else f"{len(bad)} of {len(cell['runs'])} {bad[0]}")
    return "; ".join(parts) or "no such score"
