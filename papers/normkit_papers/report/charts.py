"""Charts of a page: losses, recorded statistics, scores of a study, and time and size folded against not folded."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit_papers.report.recorded import COLOURS, Recorded, add_line, panels
from normkit_papers.studies.table import Table, number, ours

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PART = 50  # a training loss is averaged over a fiftieth of the run
FIRST = ("loss", "gap_batch", "gap_quadratic", "rms", "largest", "similarity", "gradient_norm")
"""Quantities that a reader wants to see first; the others follow by name."""
KINDS = {
    "trained": ("as trained", COLOURS[0]), "layer": ("LayerNorm", COLOURS[0]),
    "un": ("norms as multiply-adds", COLOURS[5]), "folded": ("norms folded away", COLOURS[1]),
}  # fmt: skip
"""Label and colour of bars by what a model's norms have become."""


def losses(runs: Sequence[Recorded]) -> "list[Figure]":
    """Draw the losses of training, and those of validation if there are several, a line for each run."""
    drawn = []
    for title in ("training loss, by step", "validation loss, by step"):
        figure, longest = panels(1, 1, [title]), 0
        for position, run in enumerate(runs):
            points = (
                _smooth(run.result["curve"]) if title.startswith("training") else _finite(run.result["valid"], "loss")
            )
            longest = max(longest, len(points))
            if points:
                add_line(figure, points, run.label, position)
        drawn += [figure] if longest > 1 else []
    return drawn


def _finite(points: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(point["step"], point[name]) for point in points if math.isfinite(point[name])]


def _smooth(curve: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Average each training loss with those before it, over a fiftieth of the run."""
    points = _finite(curve, "train_loss")
    window = max(1, len(points) // PART)
    return [
        (step, statistics.fmean(value for _, value in points[max(0, i - window + 1) : i + 1]))
        for i, (step, _) in enumerate(points)
    ]


def recorded_statistics(runs: Sequence[Recorded]) -> "tuple[Figure, list[str]]":
    """Draw each recorded quantity, the first one visible: a line for each run, or for each norm of a single run.

    The line of a run is the median over its norms. A trace has its quantity as `meta`.
    """
    names = {name for run in runs for name in run.recording.quantities if "[" not in name and name != "cka"}
    if any(run.result.get("curve") for run in runs):
        names -= {"loss"}  # the page shows it already
    ordered = [*(name for name in FIRST if name in names), *sorted(names - set(FIRST))]
    lines = len(runs) if len(runs) > 1 else len(runs[0].recording.sites)
    figure = panels(1, 1, height=300 + 8 * lines)  # on a phone the legend takes a line for each
    for name in ordered:
        for label, position, points in _lines(runs, name):
            style: dict[str, Any] = {
                "showlegend": True,
                "legendgroup": None,
                "visible": name == ordered[0],
                "meta": name,
            }
            add_line(figure, points, label, position, **style)
    return figure, ordered


def _lines(runs: Sequence[Recorded], name: str) -> list[tuple[str, int, list[tuple[float, float]]]]:
    found = []
    for position, run in enumerate(runs):
        series = {site: each.points() for site, each in run.recording.of(name).items()}
        if len(runs) == 1:
            found += [(site or "model", place, points) for place, (site, points) in enumerate(series.items()) if points]
            continue
        by_step: dict[int, list[float]] = {}
        for points in series.values():
            for step, value in points:
                by_step.setdefault(step, []).append(value)
        if by_step:
            found.append((run.label, position, [(step, statistics.median(by_step[step])) for step in sorted(by_step)]))
    return found


def study(table: Table) -> "list[Figure]":
    """Draw our scores beside the paper's, a chart for each column that has run."""
    drawn = []
    for place, column in enumerate(table.study.columns):
        cells = [line[place] for line in table.cells]
        if not any(cell.values for cell in cells):
            continue
        figure = panels(1, 1, [column.title], 30 + 24 * len(cells))
        for position, (name, read) in enumerate((("ours", ours), ("paper", lambda cell: number(cell.printed)))):
            values = [value if (value := read(cell)) is not None and math.isfinite(value) else None for cell in cells]
            if not any(value is not None for value in values):
                continue
            spreads = [
                statistics.stdev(cell.values) if name == "ours" and len(cell.values) > 1 else None for cell in cells
            ]
            marker = {"color": COLOURS[position], "size": 9, "symbol": "circle" if name == "ours" else "x"}
            figure.add_scatter(
                x=values, y=[row.label for row in table.study.rows], mode="markers", name=name, marker=marker,
                showlegend=True, error_x={"array": spreads},
            )  # fmt: skip
        figure.update_yaxes(autorange="reversed", automargin=True)
        drawn.append(figure)
    return drawn


class Deployed(NamedTuple):
    """Time and size of one model: milliseconds of a call, and megabytes of its weights if they are known."""

    model: str
    kind: str
    ms: float
    megabytes: float | None = None


def deployed_runs(runs: Sequence[Recorded]) -> list[Deployed]:
    """Read time and size from the results of runs that were timed, as trained and folded."""
    return [
        Deployed(run.label, kind, 1000 * fold[f"seconds_{kind}"], fold[f"megabytes_{kind}"])
        for run in runs
        if (fold := run.result.get("fold") or {})
        for kind in ("trained", "folded")
        if fold.get(f"seconds_{kind}")
    ]


def deployed_rows(rows: Sequence[dict[str, Any]]) -> list[Deployed]:
    """Read times from the rows that `benchmarks/deploy.py` measures, one input at a time.

    Of the runtimes, the fastest one stands for a model and its scheme of numbers.
    """
    fastest: dict[tuple[str, str], Deployed] = {}
    for row in rows:
        if row["batch"] == "1" and row["ms"]:
            scheme = "8-bit integers" if row["scheme"] == "dynamic" else row["scheme"]
            one = Deployed(f"{row['model']}, {scheme}", row["norm"], float(row["ms"]))
            fastest[one[:2]] = min(fastest.get(one[:2], one), one, key=lambda each: each.ms)
    return list(fastest.values())


def time_and_size(found: Sequence[Deployed]) -> "list[Figure]":
    """Draw time and, where it is known, size of models, as trained and folded."""
    models, drawn = dict.fromkeys(one.model for one in found), []
    kinds = sorted({one.kind for one in found}, key=lambda kind: ([*KINDS, kind].index(kind), kind))
    for title, name in (("milliseconds", "ms"), ("megabytes", "megabytes")):
        figure = panels(1, 1, [title], 40 + 24 * len(models))
        for kind in kinds:
            own = [one for one in found if one.kind == kind and getattr(one, name)]
            label, colour = KINDS.get(kind, (kind, COLOURS[-1]))
            figure.add_bar(
                x=[getattr(one, name) for one in own], y=[one.model for one in own], orientation="h", name=label,
                showlegend=True, marker={"color": colour},
            )  # fmt: skip
        figure.update_yaxes(autorange="reversed", automargin=True)
        drawn += [figure] if any(getattr(one, name) for one in found) else []
    return drawn
