"""Table of a study: the paper's figures beside those of our finished runs at one scale."""

import json
import math
import re
import statistics
import textwrap
from collections.abc import Callable, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

from normkit._util import align, escape, write_whole
from normkit_papers.metrics import STUDY_METRICS
from normkit_papers.report import results
from normkit_papers.report.study_tables import NONE, NOT_YET, SCHEMA, cell_text
from normkit_papers.study import Cell, Column, Study, expand, seeded, seeds
from normkit_papers.train.config import Run
from normkit_papers.train.folder import differences

FAILURE = "failed.txt"  # in a run folder in place of a result, if training raised an error
WIDTH = 120
Table = dict[str, Any]
"""Returned by `collect` and written as JSON; `text` and `markdown` format it."""


def collect(study: Study, scale: str, out: Path) -> Table:
    """Build the table of a study from the runs in `out`, with all seeds that exist.

    Raises:
        ValueError: If a run has other settings than this study at this scale: scales are never mixed.
    """
    cells = {(cell.row, cell.column): cell for cell in expand(study, scale)}
    measured = study.measured(scale) if study.measured else {}
    rows = []
    for number, row in enumerate(study.rows):
        found = []
        for place, column in enumerate(study.columns):
            cell = cells.get((number, place))
            printed = row.printed[place] if row.printed else None
            runs = measured.get((number, place), []) if cell is None else _runs(cell, column, out)
            ours = row.settings is not None
            found.append({"printed": printed, "ours": ours, "runs": runs, **_summary(runs)})
        rows.append({"label": row.label, "cells": found})
    return {
        "schema": SCHEMA,
        "study": study.id,
        "title": study.title,
        "source": study.source,
        "claim": study.claim,
        "note": study.note,
        "scale": scale,
        "columns": [_column(column) for column in study.columns],
        "rows": rows,
    }


def _column(column: Column) -> dict[str, Any]:
    metric = STUDY_METRICS[column.metric]
    return {"title": column.title, "about": metric.about, "better": metric.better, "digits": metric.digits}


def _runs(cell: Cell, column: Column, out: Path) -> list[dict[str, Any]]:
    """Read the runs of a cell, one for each seed."""
    found = []
    for seed, folder in sorted(seeds(out / cell.folder).items()):
        record: dict[str, Any] = {"seed": seed, "folder": folder.relative_to(out).as_posix(), "value": None}
        result = results.read(folder) if (folder / results.FILE).is_file() else None
        if result is not None:
            check(folder, result["run"], seeded(cell, out, seed)[1])
        if (folder / FAILURE).is_file() and (result is None or result["status"].startswith("interrupted")):
            record["status"] = (folder / FAILURE).read_text(encoding="utf8").strip()
        elif result is not None:
            metric, where = STUDY_METRICS[column.metric], result["where"]
            done = result["status"] == "done"
            record |= {
                "status": result["status"],
                "value": metric.read(folder, result) if done else None,
                "error": metric.error(folder, result) if done else None,
                "seconds": result["seconds"].get("train"),
                "command": result["command"],
                "data": _data(result),
                **{name: where.get(name) for name in ("commit", "dirty", "device", "threads", "torch", "time")},
            }
        else:
            continue
        found.append(record)
    return found


def _data(result: Mapping[str, Any]) -> str | None:
    """Name the data of a run, and how much of the test split it was scored on."""
    facts = result.get("data") or {}
    n = next((scores["n"] for scores in result["scores"].values() if scores.get("n")), None)
    if n is None or "name" not in facts:
        return None
    test = facts.get("splits", {}).get("test")
    whole = test["lines"] if isinstance(test, dict) else test
    count = f"all {n:,}" if n == whole else f"{n:,} of {whole:,}" if whole else f"{n:,}"
    return f"{facts['name']}, scored on {count} test {'words' if result['run']['task'] == 'lm' else 'items'}"


def check(folder: Path, found: Mapping[str, Any], expected: Run) -> None:
    """Raise ValueError if the settings in a folder are not those of the study's run."""
    changed = [
        f"{name} {before!r} where the study has {now!r}" for name, (before, now) in differences(found, expected).items()
    ]
    if changed:
        raise ValueError(
            f"{folder} holds a run of other settings, which this table does not mix in: {'; '.join(changed[:3])}; "
            "name another folder with --out, or delete that one"
        )


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    values = [run["value"] for run in runs if run["value"] is not None]
    return {
        "n": len(values),
        "mean": statistics.fmean(values) if values else None,
        "spread": statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None,
    }


def grid(table: Table) -> tuple[list[tuple[str, str]], list[list[str]]]:
    """Format headings (column, and "paper" or "ours") and rows."""
    heads, rows = [("", "")], [[escape(row["label"])] for row in table["rows"]]
    for place, column in enumerate(table["columns"]):
        cells = [row["cells"][place] for row in table["rows"]]
        title, printed = escape(column["title"]), any(cell["printed"] for cell in cells)
        if printed:
            heads.append((title, "paper"))
        ours = any(cell["runs"] for cell in cells) or not printed
        if ours:
            heads.append((title, f"ours, {table['scale']}"))
        for line, cell in zip(rows, cells, strict=True):
            line.extend([cell["printed"] or NONE] if printed else [])
            line.extend([cell_text(cell, column["digits"])] if ours else [])
    return heads, rows


def text(table: Table) -> str:
    """Format a table with its heading and remarks, as `normkit study` prints it."""
    heads, rows = grid(table)
    lines = [[head for head, _ in heads], [source for _, source in heads], *rows]
    notes = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in remarks(table)]
    return "\n".join([heading(table), "", align(lines, right=range(1, len(heads)), heads=2), "", *notes]) + "\n"


def markdown(table: Table, commands: bool = True) -> str:
    """Format a table as Markdown, with or without the commands of its runs."""
    heads, lines = grid(table)
    head = [f"{title}: {source}" if title else "" for title, source in heads]
    cells = [[cell.replace("|", "\\|") for cell in line] for line in (head, *lines)]
    rows = [f"| {' | '.join(line)} |" for line in (cells[0], ["---"] + ["---:"] * (len(head) - 1), *cells[1:])]
    notes = [f"- {line}" for line in remarks(table, commands)]
    return "\n".join([f"**{heading(table)}**", "", *rows, "", *notes]) + "\n"


def heading(table: Table) -> str:
    """Name study, title and source in a line."""
    source = f" ({table['source']})" if table["source"] else ""
    return f"{table['study']}: {table['title']}{source}"


def remarks(table: Table, commands: bool = True) -> list[str]:
    """List the remarks below a table: claim, order, missing runs, data, machines and commands."""
    runs = [run for row in table["rows"] for cell in row["cells"] for run in cell["runs"]]
    lines = [f"The paper's claim: {table['claim']}"] if table["claim"] else []
    lines += [table["note"]] if table["note"] else []
    lines += [line for place in range(len(table["columns"])) if (line := agreement(table, place))]
    missing = [
        column["title"]
        for place, column in enumerate(table["columns"])
        if not any(row["cells"][place]["runs"] for row in table["rows"])
    ]
    if missing:
        which = "all columns" if len(missing) == len(table["columns"]) else ", ".join(missing)
        lines.append(f"{NOT_YET.capitalize()} at scale {table['scale']}: {which}.")
    if runs:
        lines += _trained_on(table)
        seeded = any(run["seed"] is not None for run in runs)
        how = "mean ± sample standard deviation (n runs of different seeds)" if seeded else "one measurement (1)"
        lines.append(f"Ours: {how}, scale {table['scale']}.")
        made = [run for run in runs if "device" in run]
        machines = sorted({f"{run['device']}, {run['threads']} thread(s)" for run in made})
        commits = sorted({_commit(run) for run in made})
        lines += [f"Device: {'; '.join(machines)}. Commit: {', '.join(commits)}."] if made else []
        failed = {run["folder"]: run["status"] for run in runs if run["status"].startswith("failed: ")}
        lines += [f"{folder} {escape(status)}" for folder, status in failed.items()]
        if commands:
            typed = list(dict.fromkeys(run["command"] for run in made if run["command"]))
            lines += [f"Command{'s' * (len(typed) > 1)}: {'; '.join(typed)}"] if typed else []
    return lines


def _trained_on(table: Table) -> list[str]:
    """Name the data of our runs, with the columns if they differ."""
    columns: dict[str, list[str]] = {}
    for place, column in enumerate(table["columns"]):
        found = {run.get("data") for row in table["rows"] for run in row["cells"][place]["runs"]}
        for data in sorted(found - {None}):
            columns.setdefault(data, []).append(column["title"])
    names = [f"{data} ({', '.join(titles)})" if len(columns) > 1 else data for data, titles in columns.items()]
    return [f"Data of ours: {'; '.join(names)}."] if names else []


def _commit(run: Mapping[str, Any]) -> str:
    return f"{(run['commit'] or 'unknown')[:9]}{' with local changes' if run['dirty'] else ''}"


def number(printed: str | None) -> float | None:
    """Read a printed figure: a failure is infinite, a missing figure None.

    >>> number("20.91‡∗"), number("FAIL"), number("/")
    (20.91, inf, None)
    """
    if printed is None:
        return None
    if printed.lower().startswith("fail"):
        return math.inf
    match = re.match(r"-?\d+(\.\d+)?", printed)
    return float(match[0]) if match else None


def agreement(table: Table, place: int) -> str | None:
    """Count the pairs of rows that we order as the paper does; None without such pairs."""
    column = table["columns"][place]
    sign = column["better"] or 1
    theirs: dict[str, float] = {}
    ours: dict[str, float] = {}
    for row in table["rows"]:
        cell = row["cells"][place]
        printed, value = number(cell["printed"]), _ours(cell)
        if printed is not None and value is not None:
            theirs[row["label"]] = printed * sign if math.isfinite(printed) else -math.inf
            ours[row["label"]] = value * sign if math.isfinite(value) else -math.inf
    pairs = [(a, b) for a, b in combinations(theirs, 2) if theirs[a] != theirs[b]]
    if not pairs:
        return None
    pairs = [(a, b) if theirs[a] > theirs[b] else (b, a) for a, b in pairs]
    against = [f"{b} over {a}" for a, b in pairs if ours[b] > ours[a]]
    same = sum(ours[a] > ours[b] for a, b in pairs)
    which = f": {', '.join(against)}" if against else ""
    return f"{column['title']}: of {len(pairs)} pairs, ours order {same} as the paper, {len(against)} against{which}."


def _ours(cell: Mapping[str, Any]) -> float | None:
    """Mean over seeds; infinite if all seeds diverged."""
    if cell["mean"] is not None:
        return cell["mean"]
    ended = [run["status"] for run in cell["runs"]]
    return math.inf if ended and all(status.startswith("diverged") for status in ended) else None


FILES: dict[str, Callable[[Table], str]] = {
    "json": lambda table: json.dumps(table, indent=1, ensure_ascii=False) + "\n",
    "txt": text,
    "md": markdown,
}


def write(table: Table, out: Path) -> Path:
    """Write STUDY.json, .txt and .md into `out/SCALE/tables`, and return the path of the text."""
    path = out / table["scale"] / "tables" / table["study"]
    for ending, format_table in FILES.items():
        write_whole(path.with_name(f"{path.name}.{ending}"), format_table(table).encode())
    return path.with_name(f"{path.name}.txt")
