"""Verdicts: whether our runs agree with the claim of a table or figure, by the rules of its study.

A rule compares the means of two cells, or of one cell with a number. It holds if the whole 95 % interval of the
difference is on its side, it is broken if the whole interval is on the other side, and otherwise nothing can be told.
The interval is over seeds (Welch's t) or, with one run, of the sampling error of the test set.
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from normkit_papers.metrics import STUDY_METRICS, StudyMetric
from normkit_papers.report.seeds import difference, interval
from normkit_papers.studies.table import Table, TableCell
from normkit_papers.study import Rule

if TYPE_CHECKING:
    from normkit_papers.report.page import Page

AGREES, DISAGREES, UNDECIDED, INCOMPLETE = "agrees", "disagrees", "cannot tell at this size", "incomplete"
ORDER = (DISAGREES, INCOMPLETE, UNDECIDED, AGREES)  # the first one that a rule or a column has counts
BROKEN_DOWN = 0.6  # of the best row's score: a row below has failed, as one that diverged
LEARNED = 3  # the paper's best score is at most this many times ours, or a perplexity of ours that of the paper's
ABOUT = (
    "A verdict follows by rules that were written before the runs, from 95 % intervals: over seeds or, of one "
    "run, of the sampling error of its test set. Of one run without such an error nothing can be told. One rule "
    "was added after the first runs, and holds for all tables: if our best score in a column is below a third of "
    "the best that the paper prints, or a perplexity above three times it, the models have learned too little to "
    f"compare them, and the verdict on this column is '{UNDECIDED}'. So it is on a column for which no data or "
    "model fit the scale."
)


def judge(table: Table) -> tuple[str, list[str]]:
    """Return the verdict on a study, and what each of its rules found."""
    if not table.runs:
        return "not run", []
    found = [(rule, _apply(rule, table)) for rule in table.study.rules]
    lines = [f"{_text(rule)}: {verdict}{f' ({detail})' if detail else ''}" for rule, (verdict, detail) in found]
    verdicts = {verdict for _, (verdict, _) in found}
    return min(verdicts, key=ORDER.index), lines


def _text(rule: Rule) -> str:
    where = f" in {', '.join(rule.columns)}" if rule.columns else ""
    if rule.fails:
        return f"{rule.row} fails{where}"
    relation = "larger" if rule.raw else "better"
    least = f" by {rule.by:g}" if rule.by > 0 else f", or behind by at most {-rule.by:g}" if rule.by < 0 else ""
    return (
        f"{rule.row} {relation} than {rule.than}{least}{where}"
        if rule.than
        else f"{rule.row} at most {-rule.by:g}{where}"
    )


def _apply(rule: Rule, table: Table) -> tuple[str, str]:
    """Verdict of one rule over its columns, and the differences."""
    titles = [column.title for column in table.study.columns]
    places = [titles.index(title) for title in rule.columns] or range(len(titles) if "@" not in rule.row else 1)
    rows = [row for row in (rule.row, rule.than) if row]
    fit = [place for place in places if place in table.places]
    ran = [place for place in fit if all(_cell(row, table, place)[0].runs for row in rows)]
    if not fit:
        return UNDECIDED, "no data that fit this scale"
    if not ran or (rule.columns and len(ran) < len(fit)):
        return INCOMPLETE, "not run"
    learned = [place for place in ran if rule.raw or not _learned_too_little(table, place)]
    found = [difference_ for place in learned if (difference_ := _difference(rule, table, place)) is not None]
    if not found:
        return UNDECIDED, "no score" if learned else "learned too little"
    if rule.mean:
        n = len(found)
        found = [(sum(less for less, _ in found) / n, math.sqrt(sum(half**2 for _, half in found)) / n)]
    verdicts = {
        AGREES if less - half >= rule.by else DISAGREES if less + half < rule.by else UNDECIDED for less, half in found
    }
    verdicts |= {UNDECIDED} if learned != ran or (rule.columns and len(fit) < len(places)) else set()
    form = "+.3g" if rule.than or rule.fails else ".3g"
    signed = [(less if form == "+.3g" else -less, half) for less, half in found]
    detail = ", ".join(f"{x:{form}} ± {half:.2g}" if half == half else f"{x:{form}}, no interval" for x, half in signed)
    if learned != ran:  # which also leaves the verdict open
        detail += f"; of {len(ran)} columns {len(learned)}, in the others the models learned too little"
    return min(verdicts, key=ORDER.index), detail


def _learned_too_little(table: Table, place: int) -> bool:
    """Return True if our best score in a column is far from the best that the paper prints there."""
    better = STUDY_METRICS[table.study.columns[place].metric].better
    cells = [line[place] for line in table.cells]
    printed = [float(figure[0]) for cell in cells if (figure := re.match(r"[\d.]+", cell.printed or ""))]
    ours = [interval(cell.values)[0] for cell in cells if cell.values]
    if not (better and printed and ours):
        return False
    return LEARNED * max(ours) < max(printed) if better > 0 else min(ours) > LEARNED * min(printed)


def _difference(rule: Rule, table: Table, place: int) -> tuple[float, float] | None:
    """How far a row is ahead in a column, with half the 95 % interval; None if a row has no score."""
    a, metric = _cell(rule.row, table, place)
    sign = 1 if rule.raw else metric.better or -1
    if rule.fails:
        return _failure(a, [line[place] for line in table.cells], metric)
    b, other = _cell(rule.than or rule.row, table, place)
    if not a.values or not b.values:
        return None
    if not rule.than:
        mean, half = interval(a.values, _sampling_error(a, metric))
        return sign * mean, half
    less, half = difference(a.values, b.values, (_sampling_error(a, metric), _sampling_error(b, other)))
    return sign * less, half


def _cell(label: str, table: Table, place: int) -> tuple[TableCell, StudyMetric]:
    label, _, title = label.partition(" @ ")
    if title:
        place = [column.title for column in table.study.columns].index(title)
    row = [row.label for row in table.study.rows].index(label)
    return table.cells[row][place], STUDY_METRICS[table.study.columns[place].metric]


def _sampling_error(cell: TableCell, metric: StudyMetric) -> float:
    """The sampling error of the first run that has one beside its score in the CSV; nan without one."""
    for run in cell.runs or ():
        field = next((field for field in metric.fields if run.get(field) not in (None, "")), "")
        name, _, kind = field.partition(" ")
        if error := run.get(f"{name}_error {kind}"):
            return float(error)
    return math.nan


def _failure(cell: TableCell, column: Sequence[TableCell], metric: StudyMetric) -> tuple[float, float] | None:
    """1 for a row that has failed, -1 for one that has not; None if its status leaves this open."""
    if not cell.values:
        return (1.0, 0.0) if all(run["status"] != "done" for run in cell.runs or ()) else None
    own = interval(cell.values)[0]
    others = [interval(each.values)[0] for each in column if each.values]
    broken = own < BROKEN_DOWN * max(others) if metric.better > 0 else own > min(others) / BROKEN_DOWN
    return (1.0 if broken else -1.0), 0.0


def add(page: "Page", tables: Iterable[Table]) -> None:
    """Add a table of claims, runs and verdicts to a page."""
    lines, details = [["study", "the paper's claim", "what was run", "verdict"]], list[str]()
    for table in tables:
        if table.study.rules:
            verdict, found = judge(table)
            lines.append([table.study.id, table.study.claim, ran(table), verdict])
            details += [f"{table.study.id}: {line}" for line in found]
    if len(lines) > 1:
        page.heading("Verdicts")
        page.text(ABOUT)
        page.table(lines)
        page.parts.append("<details><summary>rules and differences (± half a 95 % interval)</summary>")
        page.lines(details)
        page.parts.append("</details>")


def ran(table: Table) -> str:
    """Describe the runs of a table: data, parameters, steps, seeds and minutes."""
    runs = [run for run in table.runs if run.get("steps")]
    if not runs:
        return table.study.script or "-"
    data = ", ".join(dict.fromkeys(run["data"].split(", scored")[0] for run in runs))
    spans = [
        _span(name, [float(run[name]) for run in runs if run.get(name)]) for name in ("parameters", "steps", "minutes")
    ]
    seeds = _span("seeds", [len(cell.runs) for line in table.cells for cell in line if cell.runs])
    return "; ".join([data, *spans, "1 seed" if seeds == "1 seeds" else seeds])


def _span(name: str, values: Sequence[float]) -> str:
    low, high = f"{min(values, default=0):,.0f}", f"{max(values, default=0):,.0f}"
    return f"{low if low == high else f'{low} to {high}'} {name}"
