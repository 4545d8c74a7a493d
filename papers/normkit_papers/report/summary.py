"""The table of results: every number is computed from result files."""

import math
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from normkit._util import align, escape
from normkit_papers.report.seeds import CONFIDENT, pool
from normkit_papers.report.settings import Result, Results, groups, job, labels
from normkit_papers.report.verdict import sentences
from normkit_papers.tasks import LOSS, METRICS, unit

WIDTH = 120
LEAST_LABEL = 8
SAME = "="  # the norm has no batch statistics, so that all scores are the one with running statistics
NONE = "-"
STATISTICS = ("donors", "batch", "calibrated")
MEANS = "means over seeds, with 95 % intervals:"


class Cell(NamedTuple):
    """The text of a cell, the number behind it, and the sampling error of the number."""

    text: str
    value: float | None = None
    error: float | None = None


class Column(NamedTuple):
    """A column: its heading in two lines, its meaning, and the cell of a result."""

    top: str
    bottom: str
    about: str
    cell: Callable[[Result], Cell]
    better: int = 0
    """1 if higher is better, -1 if lower is better."""

    @property
    def title(self) -> str:
        """The heading in one line."""
        return f"{self.top} {self.bottom}".strip()


def _number(value: Any, digits: int, error: Any = None, pooled: bool = False) -> Cell:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return Cell(NONE)
    if not math.isfinite(value):
        return Cell(str(value))
    error = error if isinstance(error, int | float) else None
    interval = f" \u00b1{CONFIDENT * error:.{digits}f}" if pooled and error is not None else ""
    return Cell(f"{value:,.{digits}f}{interval}", value, error)


def _score(kind: str, metric: str, digits: int = 1) -> Callable[[Result], Cell]:
    def cell(result: Result) -> Cell:
        scores = result["scores"]
        running = scores.get("running") or {}
        if kind in STATISTICS and scores.keys().isdisjoint(STATISTICS) and metric in running:
            return Cell(SAME, running[metric])
        score = scores.get(kind) or {}
        return _number(score.get(metric), digits, score.get(f"{metric}_error"), "seeds" in result)

    return cell


def _loss(result: Result) -> Cell:
    return _number((result["scores"].get("running") or {}).get("loss"), 3)


def _word_errors(result: Result) -> Cell:
    scores = result["scores"]
    return _score("beam" if "wer" in (scores.get("beam") or {}) else "running", "wer")(result)


def _speed(key: str, images: bool) -> Callable[[Result], Cell]:
    """Words or images a second, depending on the task."""

    def cell(result: Result) -> Cell:
        ours = (unit(job(result)[0]) == "images") == images
        return _number(result["speed"].get(key) if ours else None, 0)

    return cell


def _foldable(result: Result) -> Cell:
    text = escape((result.get("fold") or {}).get("foldable") or NONE)
    first, _, last = text.partition(" of ")
    return Cell(text, int(first) / int(last) if first.isdecimal() and last.isdecimal() and int(last) else None)


KINDS = {
    "running": "with the running statistics of the end of training, as in use",
    "donors": "with the statistics of other training items of the same lengths",
    "batch": "with the statistics of each test batch itself, by its right answers (until 0.2)",
    "calibrated": "with running statistics computed again after training",
    "beam": "by beam search, running statistics",
    "folded": "after the norms were folded away",
}
SHORT = {"batch": "own"}
COLUMNS = (
    Column("", "seeds", "number of runs, of which the row shows means", lambda result: _number(result.get("seeds"), 0)),
    Column("", "parameters", "learned parameters", lambda result: _number(result["parameters"], 0)),
    Column("", "loss", "cross-entropy on the test split, running statistics", _loss, -1),
    *(
        Column(metric.name, SHORT.get(kind, kind), f"{metric.about} {how}", _score(kind, metric.key), metric.better)
        for metric in METRICS
        if metric is not LOSS
        for kind, how in KINDS.items()
    ),
    Column("", "WER", "words wrong, in percent; by beam search where there was one", _word_errors, -1),
    *(
        Column(f"{unit}/s", short, f"speed of {what}", _speed(key, unit == "images"), 1)
        for unit in ("words", "images")
        for short, what, key in (
            ("train", "training", "train_words_per_s"),
            ("infer", "inference", "inference_words_per_s"),
        )
    ),
    Column("", "foldable", "norms that folding removes", _foldable),
    Column("", "status", "how the run ended", lambda result: Cell(escape(result["status"]))),
)


def columns(results: Results) -> list[Column]:
    """The columns that at least one result fills."""
    always = {"parameters", "status"}
    return [
        column
        for column in COLUMNS
        if column.title in always or any(column.cell(result).text not in (SAME, NONE) for result in results.values())
    ]


def rows(results: Results) -> list[dict[str, Cell]]:
    """The table, a row a result: the norm, then a cell for each of `columns(results)`."""
    shown, names = columns(results), labels(results)
    return [
        {"norm": Cell(names[folder]), **{column.title: column.cell(result) for column in shown}}
        for folder, result in results.items()
    ]


def best(results: Results) -> set[tuple[Any, str]]:
    """Folder and column of each cell that is the best of its column, unless all are equal."""
    found = set()
    for column in columns(results):
        if not column.better:
            continue
        cells = {folder: column.cell(result) for folder, result in results.items()}
        values = {folder: cell.value for folder, cell in cells.items() if cell.text != SAME}
        known = [value for value in values.values() if value is not None]
        top = (max if column.better > 0 else min)(known, default=None)
        if len(set(known)) < 2:
            continue
        found |= {(folder, column.title) for folder, value in values.items() if value == top}
    return found


def table(results: Results) -> str:
    """Format a text table per task and data, at most 120 columns wide."""
    kinds = groups(results)
    tables = [_table(kind, labels(results)) for kind in kinds]
    if len(kinds) == 1:
        return tables[0]
    return "\n\n".join(
        f"{' on '.join(job(next(iter(kind.values()))))}\n{lines}" for kind, lines in zip(kinds, tables, strict=True)
    )


def text(results: Results) -> str:
    """Format the table and the conclusions from it, as commands print them.

    If runs differ only in their seed, a table of means with 95 % intervals comes first, and the conclusions are about
    these means.
    """
    pooled = pool(results)
    parts = [table(results)] if len(pooled) == len(results) else [MEANS, table(pooled), "each run:", table(results)]
    conclusions = "\n".join(textwrap.fill(sentence, WIDTH, subsequent_indent="  ") for sentence in sentences(pooled))
    return "\n\n".join([*parts, conclusions]) + "\n"


def cells(results: Results) -> list[list[str]]:
    """The cells of the table as text: the headings, then a list for each result."""
    return [
        ["norm", *(column.title for column in columns(results))],
        *([c.text for c in row.values()] for row in rows(results)),
    ]


def _table(results: Results, names: dict[Any, str]) -> str:
    shown = columns(results)
    cells = [[_brief(column, column.cell(result)) for column in shown] for result in results.values()]
    lines = [[column.top for column in shown], [column.bottom for column in shown], *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(shown))]
    width = max(LEAST_LABEL, WIDTH - sum(w + 2 for w in widths))
    heads = ["", "norm", *(_cut(names[folder], width) for folder in results)]
    right = [place for place, column in enumerate(shown, 1) if column.title != "status"]
    return align([[head, *line] for head, line in zip(heads, lines, strict=True)], right, heads=2)


def _brief(column: Column, cell: Cell) -> str:
    """A status without its step, which the sentences below the table name."""
    return cell.text.split(" at step")[0][:12] if column.title == "status" else cell.text


def _cut(label: str, width: int) -> str:
    return label if len(label) <= width else label[: width - 3] + "..."
