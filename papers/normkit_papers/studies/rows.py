"""Results of studies as CSV: one file a study, one row a run."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from normkit._util import write_whole
from normkit.watch.rows import FILE as ROWS
from normkit.watch.rows import read_run
from normkit_papers import results
from normkit_papers.metrics import STUDY_METRICS, validation_metrics
from normkit_papers.study import Cell, Study, expand, seeds

KEPT = Path(__file__).parents[2] / "results"  # of a clone
FAILURE = "failed.txt"  # in a run folder in place of a result, if training raised an error
FIRST = ("study", "scale", "row", "column", "seed", "status")
LAST = (
    "parameters", "steps", "minutes", "data", "items", "command", "commit", "device", "threads", "torch", "date", "run",
)  # fmt: skip
SEPARATOR = " | "  # between the titles of the columns that a run fills

CsvRow = Mapping[str, Any]
"""A run: text from a file, or numbers from a run folder."""


def read(path: Path) -> list[dict[str, str]]:
    """Read the rows of a file.

    Raises:
        ValueError: If the file is no CSV of a study.
    """
    try:
        text = path.read_text(encoding="utf8")
        found = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV file: {error}") from None
    lacking = [name for name in FIRST if found and name not in found[0]]
    if lacking:
        raise ValueError(f"{path} has no column {' and '.join(lacking)}; results of studies have {', '.join(FIRST)}")
    if any(None in row or None in row.values() for row in found):
        raise ValueError(f"{path} has a row of another length than its header; it may be cut short")
    return found


def append(path: Path, rows: Iterable[CsvRow]) -> list[dict[str, str]]:
    """Write rows to a file, after those that it has; a row of the same run replaces the older one.

    Returns:
        All rows of the file.
    """
    merged = {_key(row): dict(row) for row in (read(path) if path.is_file() else [])}
    merged |= {_key(row): {name: _text(value) for name, value in row.items()} for row in rows}
    names = dict.fromkeys(name for row in merged.values() for name in row)
    header = [*FIRST, *(name for name in names if name not in (*FIRST, *LAST)), *LAST]
    text = io.StringIO()
    writer = csv.DictWriter(text, header, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(merged.values())
    write_whole(path, text.getvalue().encode())
    return list(merged.values())


def _key(row: CsvRow) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("study", "scale", "row", "column", "seed"))


def _text(value: Any) -> str:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.6g}"
    return "" if value is None else str(value)


def collect(study: Study, scale: str, out: Path) -> list[dict[str, Any]]:
    """Make the rows of all runs of a study that have ended, one for each run and row of the table."""
    by_run: dict[tuple[int, Path], list[Cell]] = {}
    for cell in expand(study, scale):
        by_run.setdefault((cell.row, cell.folder), []).append(cell)
    found = []
    for (number, folder), cells in by_run.items():
        columns = [study.columns[cell.column] for cell in cells]
        for seed, place in sorted(seeds(out / folder).items()):
            if facts := _facts(place, [column.metric for column in columns]):
                titles = SEPARATOR.join(column.title for column in columns)
                start = {"study": study.id, "scale": scale, "row": study.rows[number].label, "column": titles}
                found.append({**start, "seed": seed, **facts, "run": place.relative_to(out).as_posix()})
    return found


def _facts(folder: Path, metrics: Sequence[str]) -> dict[str, Any] | None:
    """Status, scores and circumstances of a run; None if it has not ended."""
    result = results.read(folder) if (folder / results.FILE).is_file() else None
    if (folder / FAILURE).is_file() and (result is None or result["status"].startswith("interrupted")):
        return {"status": (folder / FAILURE).read_text(encoding="utf8").strip()}
    if result is None:
        return None
    found: dict[str, Any] = {"status": result["status"], **flat_scores(result)}
    if result["status"] == "done":
        found |= validation_metrics(result)
        if (folder / ROWS).is_file():
            recording, last = read_run(folder), result["run"]["steps"]
            chosen = {name: STUDY_METRICS[name].summary for name in metrics}
            found |= {name: summary(recording, last) for name, summary in chosen.items() if summary}
    where = result["where"]
    return (
        found
        | {
            "tokens/s": result["speed"].get("train_tokens_per_s"),
            "parameters": result["parameters"],
            "steps": result["run"]["steps"],
            "minutes": (result["seconds"].get("train") or 0) / 60,
            "data": (result.get("data") or {}).get("name", result["run"]["data"]),
            "items": next((scores["n"] for scores in result["scores"].values() if scores.get("n")), None),
            "command": result["command"],
            "commit": (where.get("commit") or "")[:9] + ("+" if where.get("dirty") else ""),  # + local changes
            **{name: where.get(name) for name in ("device", "threads", "torch")},
            "date": (where.get("time") or "")[:10],
        }
    )


def flat_scores(result: Mapping[str, Any]) -> dict[str, float]:
    """Scores of a run by name and kind.

    >>> flat_scores({"scores": {"running": {"bleu": 30.1, "n": 100}}})
    {'bleu running': 30.1}
    """
    return {
        f"{name} {kind}": value
        for kind, scores in result["scores"].items()
        for name, value in scores.items()
        if name != "n"
    }


def known(study: Study, scale: str, out: Path) -> tuple[list[dict[str, str]], Path | None]:
    """Read the rows of a study at a scale: from `out`, or else from the kept results of a clone.

    Returns:
        The rows, and the file that they come from.
    """
    for folder in (out, KEPT):
        path = folder / f"{study.id}.csv"
        if path.is_file() and (found := [row for row in read(path) if row["scale"] == scale]):
            return found, path
    return [], None
