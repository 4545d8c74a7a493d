"""Table of a study: the paper's figures beside those of our runs at one scale, from the rows of a CSV."""

import math
import statistics
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from normkit._util import align, escape, narrow
from normkit_papers.metrics import STUDY_METRICS
from normkit_papers.studies.rows import SEPARATOR, CsvRow
from normkit_papers.study import Study, expand

WIDTH = 120
NOT_YET = "not yet run"
NONE = "-"


class TableCell(NamedTuple):
    """The paper's figure, if it printed one, and our runs.

    `runs` is None if the figure is quoted, or no data here fit the scale.
    """

    printed: str | None
    runs: list[CsvRow] | None
    values: list[float]
    digits: int = 1
    minutes: float = math.nan  # that the other runs of the column took, if there are any

    def __str__(self) -> str:
        """Format ours: mean ± sample standard deviation (n), and runs that did not finish.

        >>> str(TableCell(None, [{"status": "diverged at step 7"}], []))
        'diverged at step 7'
        >>> str(TableCell(None, [{"status": "done"}], [0.00002], digits=4))
        '2.0e-05 (1)'
        """
        if not self.runs:
            cost = "" if math.isnan(self.minutes) else f" ({self.minutes:.0f} min)"
            return NONE if self.runs is None else NOT_YET + cost
        parts = []
        if n := len(self.values):
            finite = n > 1 and all(map(math.isfinite, self.values))
            mean, spread = statistics.fmean(self.values), statistics.stdev(self.values) if finite else math.nan
            form = f",.{self.digits}f" if mean == 0 or abs(mean) >= 10**-self.digits else ".1e"
            parts.append(f"{mean:{form}}{f' ± {spread:{form}}' if finite else ''} ({n})")
        if bad := [row["status"].split(": ")[0] for row in self.runs if row["status"] != "done"]:
            parts.append(bad[0] if len(self.runs) == 1 else f"{len(bad)} of {len(self.runs)} {bad[0]}")
        return escape("; ".join(parts)) or "no such score"


class Table(NamedTuple):
    """A study at a scale, with a row of cells for each of its rows."""

    study: Study
    scale: str
    cells: list[list[TableCell]]

    @property
    def places(self) -> set[int]:
        """The columns that have runs at this scale, or can have."""
        return {place for line in self.cells for place, cell in enumerate(line) if cell.runs is not None}

    @property
    def runs(self) -> list[CsvRow]:
        """All rows of the CSV that the table shows."""
        found = {id(run): run for line in self.cells for cell in line for run in cell.runs or ()}
        return list(found.values())


def build(study: Study, scale: str, rows: Sequence[CsvRow]) -> Table:
    """Put the rows of a CSV, those of this study and scale, into the places of its table."""
    lines, fit = [], {cell.column for cell in expand(study, scale)}
    for row in study.rows:
        line = []
        for place, column in enumerate(study.columns):
            metric = STUDY_METRICS[column.metric]
            runs = [run for run in rows if run["row"] == row.label and column.title in run["column"].split(SEPARATOR)]
            done = [metric.value(run) for run in runs if run["status"] == "done"]
            values = [value for value in done if value is not None]
            printed = row.printed[place] if row.printed else None
            here = row.settings is not None and (runs or place in fit)
            line.append(TableCell(printed, runs if here else None, values, metric.digits))
        lines.append(line)
    for place in range(len(study.columns)):
        runs = [run for line in lines for run in line[place].runs or ()]
        took = [float(run["minutes"]) for run in runs if run.get("minutes")]
        if took:
            for line in lines:
                line[place] = line[place]._replace(minutes=statistics.median(took))
    return Table(study, scale, lines)


def grid(table: Table) -> list[list[str]]:
    """Format a table: two lines of headings (column; "paper" or "ours"), then the rows."""
    heads: list[list[str]] = [[""], [""]]
    ran, paper = (_data(table.study, scale) for scale in (table.scale, "paper"))
    lines = [[escape(row.label)] for row in table.study.rows]
    for place, column in enumerate(table.study.columns):
        cells = [line[place] for line in table.cells]
        printed = any(cell.printed for cell in cells)
        ours = any(cell.runs for cell in cells) or not printed
        instead = f": {', '.join(ran[place])}" if ran[place] and paper[place] not in ([], ran[place]) else ""
        for shown, title in ((printed, "paper"), (ours, f"ours, {table.scale}{instead}")):
            if shown:
                heads[0].append(escape(column.title))
                heads[1].append(title)
        for line, cell in zip(lines, cells, strict=True):
            line.extend([cell.printed or NONE] if printed else [])
            line.extend([str(cell)] if ours else [])
    return [*heads, *lines]


def _data(study: Study, scale: str) -> list[list[str]]:
    """Names of the data sets of each column."""
    cells = expand(study, scale)
    return [sorted({cell.run.data for cell in cells if cell.column == place}) for place in range(len(study.columns))]


def text(table: Table) -> str:
    """Format a table with its heading and remarks, as `papers study` prints it."""
    parts = [align(lines, range(1, len(lines[0])), heads=2) for lines in narrow(grid(table), WIDTH)]
    title, *notes = (
        textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in (heading(table.study), *remarks(table))
    )
    return "\n".join([title, "", "\n\n".join(parts), "", *notes])


def _scored(run: CsvRow) -> str:
    """Name the data of a run, and how much it is scored on."""
    told = not run["items"] or "scored on" in run["data"]
    return run["data"] if told else f"{run['data']}, {int(run['items']):,} test items"


def heading(study: Study) -> str:
    """Name study, title and source in a line."""
    return f"{study.id}: {study.title}{f' ({study.source})' if study.source else ''}"


def remarks(table: Table) -> list[str]:
    """List the remarks below a table: claim, missing runs, data, devices."""
    study = table.study
    lines = [f"The paper's claim: {study.claim}"] if study.claim else []
    lines += [study.note] if study.note else []
    marks = sorted({mark for line in table.cells for cell in line for mark in cell.printed or "" if mark in "*†‡"})
    lines += [f"The paper marks figures with {', '.join(marks)}; see its caption."] if marks else []
    here = table.places
    empty = [place for place in range(len(study.columns)) if not any(line[place].runs for line in table.cells)]
    kinds = {
        NOT_YET.capitalize(): [place for place in empty if place in here],
        "Without data or a model that fit this scale": [place for place in empty if place not in here],
    }
    for what, places in kinds.items():
        names = ", ".join(study.columns[place].title for place in places)
        which = "all columns" if len(places) == len(study.columns) else names
        lines += [f"{what}, {table.scale}: {which}."] if places else []
    meanings: dict[str, list[str]] = {}
    for column in study.columns:
        meanings.setdefault(STUDY_METRICS[column.metric].meaning, []).append(column.title)
    lines += [f"Column {'; '.join(titles)}: {meaning}." for meaning, titles in meanings.items() if meaning]
    if runs := table.runs:
        made = [run for run in runs if run.get("device")]
        facts = {
            "Data": {_scored(run) for run in made},
            "Devices": {f"{run['device']}, {run['threads']} thread(s)" for run in made},
            "Commits": {run["commit"] for run in made},
        }
        lines += [f"{title}: {'; '.join(sorted(found))}." for title, found in facts.items() if found]
        lines.append("Ours: mean ± sample standard deviation (number of runs); of runs to come, the minutes of a core.")
        failed = {run["run"]: run["status"] for run in runs if run["status"].startswith("failed: ")}
        lines += [escape(f"{folder} {status}") for folder, status in failed.items()]
    return lines
