"""Verdicts: whether our runs agree with the claim of a table or figure, by rules that were written before the runs.

A rule compares the means of two cells, or of one cell with a number. It holds if the whole 95 % interval of the
difference is on its side, it is broken if the whole interval is on the other side, and otherwise nothing can be told.
The interval is over seeds (Welch's t) or, with one run, of the sampling error of the test set.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from normkit_papers.metrics import STUDY_METRICS, StudyMetric
from normkit_papers.report.seeds import difference, interval
from normkit_papers.studies.rows import CsvRow
from normkit_papers.studies.table import Table, TableCell

if TYPE_CHECKING:
    from normkit_papers.report.page import Page

AGREES, DISAGREES, UNDECIDED, INCOMPLETE = "agrees", "disagrees", "cannot tell at this size", "incomplete"
ORDER = (DISAGREES, INCOMPLETE, UNDECIDED, AGREES)  # the first one that a rule or a column has counts
BROKEN_DOWN = 0.6  # of the best row's score: a row below has failed, as one that diverged


class Rule(NamedTuple):
    """A row is better than another by at least `by` in some columns.

    Attributes:
        row: Label of the row; "ROW @ COLUMN" takes its number from that column instead.
        than: Label of the other row; empty to compare the number itself with `by`.
        columns: Titles of the columns, in each of which the rule must hold; empty for all in which both rows ran.
        by: Least difference, in units of the metric; below 0, the row may be worse by this much.
        mean: The rule is about the mean over the columns.
        fails: The row diverges, or its score is below 0.6 of the best row's.
        raw: Larger counts, whether or not it is better.
    """

    row: str
    than: str = ""
    columns: tuple[str, ...] = ()
    by: float = 0.0
    mean: bool = False
    fails: bool = False
    raw: bool = False


def better(*rows: str, columns: Sequence[str] = (), by: float = 0.0, mean: bool = False) -> tuple[Rule, ...]:
    """Each row is better than the next one."""
    return tuple(Rule(a, b, tuple(columns), by, mean) for a, b in itertools.pairwise(rows))


def best(row: str, *others: str, columns: Sequence[str] = (), by: float = 0.0) -> tuple[Rule, ...]:
    """One row is better than each of the others."""
    return tuple(Rule(row, other, tuple(columns), by) for other in others)


def level(row: str, *others: str, within: float, columns: Sequence[str] = (), mean: bool = False) -> tuple[Rule, ...]:
    """A row and each of the others differ by at most `within`."""
    pairs = [pair for other in others for pair in ((row, other), (other, row))]
    return tuple(Rule(a, b, tuple(columns), -within, mean) for a, b in pairs)


def larger(row: str, than: str, *columns: str) -> tuple[Rule, ...]:
    """The number of a row is larger than that of another, whether or not this is better."""
    return (Rule(row, than, columns, raw=True),)


def fails(row: str, *columns: str) -> tuple[Rule, ...]:
    """A row fails in some columns."""
    return (Rule(row, "", columns, fails=True),)


_POST, _PRE, _FIX = "PostNorm + LN", "PreNorm + LN", "PreNorm + FixNorm + LN"
_BEST = "PreNorm + FixNorm + ScaleNorm"
_LM = "Tensor-Transformer 1core + "
_LANGUAGE = better(*(f"{_LM}{norm}" for norm in ("PN", "LN", "PN-V", "BN")))
_FOLDING = ("BN, folds", "MABN, folds", "PN*, folds")
_RESNET, _TRANSFORMER = "ResNet20 on CIFAR-10", "Transformer BN on IWSLT14"
_PARTS = ("1: GM, AM, alpha", "2: AM, alpha", "3: GM, alpha", "4: GM, AM", "5: GM")
_SQRT = "ScaleNorm (g = √d) + FixNorm + ValDecay"

RULES: dict[str, tuple[Rule, ...]] = {
    "pn.table1": (
        *better("Pre-Norm PN", "Pre-Norm LN"),
        *better("Pre-Norm LN", "Pre-Norm PN-V", columns=("WMT14 big",)),
        *better("Pre-Norm PN-V", "Pre-Norm BN"),
    ),
    "pn.table2": _LANGUAGE,
    "pn.table3": _LANGUAGE,
    "pn.table4": (
        *better("PN", "GN", "LN"),
        *(rule for norm in ("BRN", "MABN", "PN-V") for rule in better("LN", norm, "BN", by=-0.1)),
    ),
    "pn.figure2": larger(_TRANSFORMER, _RESNET),
    "pn.figure3": larger(_TRANSFORMER, _RESNET, "g_mu outliers", "g_sigma2 outliers"),
    "pn.figure4": (
        *larger("BN @ variance", "PN-V @ quadratic mean"),
        *larger("BN @ g_sigma2 outliers", "PN-V @ g_psi2 outliers"),
    ),
    "pn.figure5": (*better("PN", "LN"), *better("LN", "BN"), *level("PN-V", "LN", within=0.5, columns=("4k",))),
    "pn.figure6": better("PN", "LN"),
    "pn.figure7": (Rule("PN-V", "", ("largest ratio",), by=-1.0),),  # lower is better: at most 1
    "tears.table2": (
        *fails("Xavier PostNorm", "4k", "8k"),
        *better("Xavier PreNorm", "Xavier PostNorm"),
        *level("SmallInit PostNorm", "SmallInit PreNorm", within=1.0),
    ),
    "tears.table3": better(_BEST, _FIX, _PRE, _POST, mean=True),
    "tears.table4": (
        *better("InvSqrtDecay", "NoWarmup", columns=("gl-en",)),
        *level("NoWarmup", "InvSqrtDecay", within=0.5, columns=("sk-en", "en-vi", "en-he", "ar-en"), mean=True),
        *level("InvSqrtDecay + 2xLR", "InvSqrtDecay", within=0.5, mean=True),
    ),
    "tears.table5": (
        *fails("PostNorm", "5 layers", "6 layers"),
        *better("PreNorm", "PostNorm", columns=("4 layers",)),
    ),
    "tears.table6": (
        *better(_POST, _PRE),
        *level(_BEST, _PRE, within=0.5),
        *level("PostNorm + FixNorm + ScaleNorm", _POST, within=0.5),
    ),
    "tears.table7": (
        *level("RMSNorm + FixNorm", "ScaleNorm + FixNorm", within=0.5, mean=True),
        *better(_SQRT, f"{_SQRT} + 2xLR", columns=("en-he", "ar-en")),
    ),
    "tears.table8": (
        *larger("gl-en @ LN test", "gl-en @ ScaleNorm test"),
        *larger("sk-en @ LN test", "sk-en @ ScaleNorm test"),
    ),
    "tears.figure1": better(_BEST, _PRE, _POST),
    "tears.figure2": larger(_POST, _PRE),
    "tears.figure3": tuple(
        rule
        for pair in ("en-vi", "en-he", "ar-en")
        for rule in larger(f"{_BEST} @ {pair}, decoder, deep", f"{_BEST} @ {pair}, decoder, shallow")
    ),
    "tears.figure4": (
        *larger("with label smoothing", "without label smoothing", "decoder, deep"),
        *larger("without label smoothing", "with label smoothing", "output"),
    ),
    "un.table1": (
        *level("UN, folds", "LN", within=0.5),
        *best("UN, folds", *_FOLDING, by=-0.5),
        *best("UN, folds", "BN, folds", by=2.0),
        *fails("NoNorm", "IWSLT14"),
    ),
    "un.table2": (
        *best("UN, folds", *_FOLDING, by=-0.2),
        *level("UN, folds", "LN", within=1.0),
        *fails("MABN, folds", "T2T-ViT-14 ImageNet"),
        *fails("PN*, folds", "T2T-ViT-14 ImageNet"),
    ),
    "un.table3": (*best("UN, folds", *_FOLDING), *level("UN, folds", "LN", within=1.0)),
    "un.table4": (*best("UN, folds", *_FOLDING, columns=("box AP", "mask AP")),
                  *level("UN, folds", "LN", within=1.0, columns=("box AP", "mask AP"))),
    "un.table5": best(*_PARTS),
    "un.table6": level("M = 4", "M = 2", "M = 6", "M = 8", "M = 10", within=0.5),
    "un.table7": (
        *fails("without", "T2T-ViT-14 ImageNet", "Faster RCNN box AP", "Mask RCNN box AP"),
        *level("with", "without", within=0.5, columns=("Swin-T ImageNet",)),
    ),
    "un.table8": (*larger("UN", "LN", "ImageNet TPUT", "COCO TPUT"), *larger("LN", "UN", "ImageNet MEM", "COCO MEM")),
    "un.table9": (*fails(_PARTS[3]), *fails(_PARTS[4]), *better(*_PARTS[:2])),
    "un.table10": (
        *level("alpha = 0.9", "alpha = 0.8", "alpha = 0.7", "alpha = 0.6", within=0.5, columns=("box AP", "mask AP")),
        *fails("alpha = 0.6", "IWSLT14 BLEU"),
    ),
    "un.figure1": (*best("UN", "BN", "MABN", "PN*"), *level("UN", "LN", within=1.0)),
    "un.figure3": larger("UN @ gradients", "UN @ activations"),
    "un.figure4": larger("UN @ its arithmetic mean", "UN @ its geometric mean"),
    "un.figure5": (
        *larger("UN @ Swin-T, deep", "UN @ Swin-T, shallow"),
        *larger("UN @ Swin-T, late", "UN @ Swin-T, early"),
    ),
    "un.figure6": better("UN", "BN", columns=("all layers", "first third of the layers")),
}  # fmt: skip
"""By study."""


def judge(table: Table) -> tuple[str, list[str]]:
    """Return the verdict on a study, and what each of its rules found."""
    if not table.runs:
        return "not run", []
    found = [(rule, _apply(rule, table)) for rule in RULES[table.study.id]]
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
    """Verdict of one rule over its columns, and the differences; incomplete if a row that it needs has not run."""
    titles = [column.title for column in table.study.columns]
    places = [titles.index(title) for title in rule.columns] or range(len(titles) if "@" not in rule.row else 1)
    rows = [row for row in (rule.row, rule.than) if row]
    ran = [place for place in places if all(_cell(row, table, place)[0].runs for row in rows)]
    if not ran or (rule.columns and len(ran) < len(places)):
        return INCOMPLETE, "not run"
    found = [difference_ for place in ran if (difference_ := _difference(rule, table, place)) is not None]
    if not found:
        return UNDECIDED, "no score"
    if rule.mean:
        n = len(found)
        found = [(sum(less for less, _ in found) / n, math.sqrt(sum(half**2 for _, half in found)) / n)]
    verdicts = {
        AGREES if less - half >= rule.by else DISAGREES if less + half < rule.by else UNDECIDED for less, half in found
    }
    detail = ", ".join(f"{less:+.3g} ± {half:.2g}" if half == half else f"{less:+.3g}" for less, half in found)
    return min(verdicts, key=ORDER.index), detail


def _difference(rule: Rule, table: Table, place: int) -> tuple[float, float] | None:
    """How far a row is ahead in a column, with half the 95 % interval; None if a row has no score."""
    a, metric = _cell(rule.row, table, place)
    sign = 1 if rule.raw else metric.better or -1
    if rule.fails:
        return _failure(a, [line[place] for line in table.cells], metric)
    if not rule.than:
        mean, half = _mean(a, metric)
        return None if mean is None else (sign * mean, half)
    b, other = _cell(rule.than, table, place)
    if not a.values or not b.values:
        return None
    less, half = difference(a.values, b.values)
    if math.isnan(half):
        half = math.hypot(_mean(a, metric)[1], _mean(b, other)[1])
    return sign * less, half


def _cell(label: str, table: Table, place: int) -> tuple[TableCell, StudyMetric]:
    label, _, title = label.partition(" @ ")
    if title:
        place = [column.title for column in table.study.columns].index(title)
    row = [row.label for row in table.study.rows].index(label)
    return table.cells[row][place], STUDY_METRICS[table.study.columns[place].metric]


def _mean(cell: TableCell, metric: StudyMetric) -> tuple[float | None, float]:
    """Mean of a cell, and half its 95 % interval: over seeds or, of one run, by its sampling error."""
    if not cell.values:
        return None, math.nan
    mean, half = interval(cell.values)
    errors = [float(error) for run in cell.runs or () if (error := sampling_error(run, metric))]
    return mean, 1.96 * errors[0] if len(cell.values) == 1 and errors else half


def sampling_error(run: CsvRow, metric: StudyMetric) -> str:
    """The sampling error of a run's score, beside the score in the CSV; empty if it is unknown."""
    field = next((field for field in metric.fields if run.get(field) not in (None, "")), "")
    name, _, kind = field.partition(" ")
    return str(run.get(f"{name}_error {kind}") or "")


def _failure(cell: TableCell, column: Sequence[TableCell], metric: StudyMetric) -> tuple[float, float] | None:
    """1 for a row that has failed, -1 for one that has not; None if its status leaves this open."""
    if not cell.values:
        return (1.0, 0.0) if all(run["status"] != "done" for run in cell.runs or ()) else None
    own = interval(cell.values)[0]
    others = [interval(each.values)[0] for each in column if each.values]
    broken = own < BROKEN_DOWN * max(others) if metric.better > 0 else own > min(others) / BROKEN_DOWN
    return (1.0 if broken else -1.0), 0.0


def add(page: "Page", tables: Iterable[Table]) -> None:
    """Add a table of verdicts to a page: claim, what was run, and the verdict of each study with its rules."""
    lines, details = [["study", "the paper's claim", "what was run", "verdict"]], list[str]()
    for table in tables:
        if table.study.id in RULES:
            verdict, found = judge(table)
            lines.append([table.study.id, table.study.claim, ran(table), verdict])
            details += [f"{table.study.id}: {line}" for line in found]
    if len(lines) > 1:
        page.heading("Verdicts")
        page.table(lines)
        page.parts.append("<details><summary>rules and differences (± half a 95 % interval)</summary>")
        page.lines(details)
        page.parts.append("</details>")


def ran(table: Table) -> str:
    """Describe the runs of a table: data, parameters, steps, seeds and minutes."""
    runs = [run for run in table.runs if run.get("steps")]
    if not runs:
        return "-"
    data = ", ".join(dict.fromkeys(run["data"] for run in runs))
    seeds = max(len(cell.runs or ()) for line in table.cells for cell in line)
    spans = [
        _span(name, [float(run[name]) for run in runs if run.get(name)]) for name in ("parameters", "steps", "minutes")
    ]
    return "; ".join([data, *spans, f"{seeds} seed{'s' * (seeds > 1)}"])


def _span(name: str, values: list[float]) -> str:
    low, high = f"{min(values, default=0):,.0f}", f"{max(values, default=0):,.0f}"
    return f"{low if low == high else f'{low} to {high}'} {name}"
