"""The headline table and what is seen in it: every figure and every sentence is made from result files."""

import math
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from normkit.lab.report.settings import Result, Results, groups, job, labels
from normkit.lab.report.verdict import sentences
from normkit.lab.tasks import LOSS, METRICS, unit
from normkit.text import align, escape

WIDTH = 120
LEAST_LABEL = 8
SAME = "="  # stands where a norm has no statistics of batches: the score with running ones is the only one
NONE = "-"
STATISTICS = ("batch", "calibrated")


class Cell(NamedTuple):
    """What a place of the table shows, the number behind it, and that number's sampling error."""

    text: str
    value: float | None = None
    error: float | None = None


class Column(NamedTuple):
    """A column: its heading in two lines, what it means, and how a result fills it."""

    top: str
    bottom: str
    about: str
    cell: Callable[[Result], Cell]
    better: int = 0
    """1 where more is better, -1 where less is."""

    @property
    def title(self) -> str:
        """The heading in one line."""
        return f"{self.top} {self.bottom}".strip()


def _number(value: Any, digits: int, error: Any = None) -> Cell:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return Cell(NONE)
    if not math.isfinite(value):
        return Cell(str(value))
    return Cell(f"{value:,.{digits}f}", value, error if isinstance(error, int | float) else None)


def _score(kind: str, metric: str, digits: int = 1) -> Callable[[Result], Cell]:
    def cell(result: Result) -> Cell:
        scores = result["scores"]
        running = scores.get("running") or {}
        if kind in STATISTICS and kind not in scores and metric in running:
            return Cell(SAME, running[metric])
        score = scores.get(kind) or {}
        return _number(score.get(metric), digits, score.get(f"{metric}_error"))

    return cell


def _loss(result: Result) -> Cell:
    return _number((result["scores"].get("running") or {}).get("loss"), 3)


def _word_errors(result: Result) -> Cell:
    scores = result["scores"]
    return _score("beam" if "wer" in (scores.get("beam") or {}) else "running", "wer")(result)


def _speed(key: str, pictures: bool) -> Callable[[Result], Cell]:
    """Words or images a second: a result says the one or the other, by its task."""

    def cell(result: Result) -> Cell:
        ours = (unit(job(result)[0]) == "images") == pictures
        return _number(result["speed"].get(key) if ours else None, 0)

    return cell


def _foldable(result: Result) -> Cell:
    text = escape((result.get("fold") or {}).get("foldable") or NONE)
    first, _, last = text.partition(" of ")
    return Cell(text, int(first) / int(last) if first.isdecimal() and last.isdecimal() and int(last) else None)


KINDS = {
    "running": "with the running statistics that training left, as in use",
    "batch": "with the statistics of each test batch, as in training",
    "calibrated": "with running statistics counted anew after training",
    "beam": "by beam search, running statistics",
    "folded": "after the norms were folded away",
}
COLUMNS = (
    Column("", "parameters", "numbers that are learned", lambda result: _number(result["parameters"], 0)),
    Column("", "loss", "cross-entropy on the test split, running statistics", _loss, -1),
    *(
        Column(metric.name, kind, f"{metric.about} {how}", _score(kind, metric.key), metric.better)
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
    Column("", "foldable", "norms that vanish when the model is folded", _foldable),
    Column("", "status", "how the run ended", lambda result: Cell(escape(result["status"]))),
)


def columns(results: Results) -> list[Column]:
    """The columns that some result fills, and no others."""
    always = {"parameters", "status"}
    return [
        column
        for column in COLUMNS
        if column.title in always or any(column.cell(result).text not in (SAME, NONE) for result in results.values())
    ]


def rows(results: Results) -> list[dict[str, Cell]]:
    """The headline table, a row a result: the norm first, then a cell for each of `columns(results)`."""
    shown, names = columns(results), labels(results)
    return [
        {"norm": Cell(names[folder]), **{column.title: column.cell(result) for column in shown}}
        for folder, result in results.items()
    ]


def best(results: Results) -> set[tuple[Any, str]]:
    """Folder and column of each cell that is the best of its column; none is where all are alike."""
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
    """The headline table as aligned text, at most 120 columns wide; one table for each task and source of data."""
    kinds = groups(results)
    tables = [_table(kind, labels(results)) for kind in kinds]
    if len(kinds) == 1:
        return tables[0]
    return "\n\n".join(
        f"{' on '.join(job(next(iter(kind.values()))))}\n{lines}" for kind, lines in zip(kinds, tables, strict=True)
    )


def text(results: Results) -> str:
    """Table, what its columns mean, and what is seen in it: what a command prints."""
    return f"{table(results)}\n\n{verdict(results)}\n"


def verdict(results: Results) -> str:
    """What is seen in the table (see `normkit.lab.report.verdict`), a sentence a line, long ones on several."""
    return "\n".join(textwrap.fill(sentence, WIDTH, subsequent_indent="  ") for sentence in sentences(results))


def cells(results: Results) -> list[list[str]]:
    """The headline table as text: the headings, then a list for each result."""
    return [
        ["norm", *(column.title for column in columns(results))],
        *([c.text for c in row.values()] for row in rows(results)),
    ]


def _table(results: Results, names: dict[Any, str]) -> str:
    shown = columns(results)
    cells = [[_brief(column, column.cell(result)) for column in shown] for result in results.values()]
    lines = [[column.top for column in shown], [column.bottom for column in shown], *cells]
    widths = [max(len(line[place]) for line in lines) for place in range(len(shown))]
    room = max(LEAST_LABEL, WIDTH - sum(width + 2 for width in widths))
    heads = ["", "norm", *(_cut(names[folder], room) for folder in results)]
    right = [place for place, column in enumerate(shown, 1) if column.title != "status"]
    return align([[head, *line] for head, line in zip(heads, lines, strict=True)], right, heads=2)


def _brief(column: Column, cell: Cell) -> str:
    """A status without its step, which the sentences below the table tell."""
    return cell.text.split(" at step")[0][:12] if column.title == "status" else cell.text


def _cut(label: str, room: int) -> str:
    return label if len(label) <= room else label[: room - 3] + "..."
