"""Charts of a page: losses, recorded statistics, scores of a study, and time and size folded against not folded."""

import math
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit_papers.report.recorded import COLOURS, Recorded, add_line, panels
from normkit_papers.studies.table import Table, number, ours

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PART = 50  # a training loss is averaged over a fiftieth of the run
FIRST = ("gap_batch", "distance_mean", "distance_var", "distance_quadratic", "gradient_norm", "learned_g")
"""Quantities that a reader wants to see first; the others follow by name."""


def losses(runs: Sequence[Recorded]) -> "Figure":
    """Draw the losses of training and validation of each run."""
    figure = panels(1, 2, ["training", "validation"])
    for number_, run in enumerate(runs):
        curve = [(p["step"], p["train_loss"]) for p in run.result["curve"] if math.isfinite(p["train_loss"])]
        window = max(1, len(curve) // PART)
        smooth = [
            (curve[i][0], statistics.fmean(value for _, value in curve[max(0, i - window + 1) : i + 1]))
            for i in range(len(curve))
        ]
        valid = [(p["step"], p["loss"]) for p in run.result["valid"] if math.isfinite(p["loss"])]
        for column, points in enumerate((smooth, valid), 1):
            if points:
                add_line(figure, points, run.label, number_, column=column)
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="loss", col=1)
    return figure


def recorded_statistics(runs: Sequence[Recorded]) -> "Figure | None":
    """Draw each recorded quantity, one at a time by a menu: a line for each run, or for each norm of a single run.

    The line of a run is the median over its norms.
    """
    names = sorted({name for run in runs for name in run.recording.quantities if "[" not in name and name != "cka"})
    names = [*(name for name in FIRST if name in names), *(name for name in names if name not in FIRST)]
    if not names:
        return None
    figure, owners = panels(1, 1, height=380), list[str]()
    for name in names:
        for label, position, points in _lines(runs, name):
            add_line(figure, points, label, position, showlegend=True, visible=name == names[0], legendgroup=None)
            owners.append(name)
    buttons = [
        {"label": name, "method": "update", "args": [{"visible": [owner == name for owner in owners]}]}
        for name in names
    ]
    menu = {"buttons": buttons, "x": 0, "xanchor": "left", "y": 1.18, "yanchor": "bottom", "bgcolor": "#fff"}
    figure.update_layout(updatemenus=[menu])
    figure.update_xaxes(title="step")
    return figure


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


def study(table: Table) -> "Figure | None":
    """Draw our scores beside the paper's, a panel a column; None for a table without runs."""
    places = [place for place in range(len(table.study.columns)) if any(line[place].values for line in table.cells)]
    if not places:
        return None
    figure = panels(1, len(places), [table.study.columns[place].title for place in places], 120 + 26 * len(table.cells),
                    shared_yaxes=True)  # fmt: skip
    for panel, place in enumerate(places, 1):
        for position, (name, read) in enumerate((("ours", ours), ("paper", lambda cell: number(cell.printed)))):
            values = [read(line[place]) for line in table.cells]
            finite = [value if value is not None and math.isfinite(value) else None for value in values]
            spreads = [
                statistics.stdev(line[place].values) if name == "ours" and len(line[place].values) > 1 else None
                for line in table.cells
            ]
            marker = {"color": COLOURS[position], "size": 9, "symbol": "circle" if name == "ours" else "x"}
            figure.add_scatter(
                x=finite, y=[row.label for row in table.study.rows], mode="markers", name=name, marker=marker,
                legendgroup=name, showlegend=panel == 1, row=1, col=panel, error_x={"array": spreads},
            )  # fmt: skip
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure


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
            one = Deployed(f"{row['model']}, {row['scheme']}", row["norm"], float(row["ms"]))
            fastest[one[:2]] = min(fastest.get(one[:2], one), one, key=lambda each: each.ms)
    return list(fastest.values())


def time_and_size(found: Sequence[Deployed]) -> "Figure | None":
    """Draw time and size of models, as trained and folded; None without a measurement."""
    if not found:
        return None
    models = dict.fromkeys(one.model for one in found)
    titles = ["milliseconds", "megabytes"][: 1 + any(one.megabytes for one in found)]
    figure = panels(1, len(titles), titles, 60 + 34 * len(models), shared_yaxes=True)
    for position, kind in enumerate(dict.fromkeys(one.kind for one in found)):
        own = [one for one in found if one.kind == kind]
        measured = ([one.ms for one in own], [one.megabytes for one in own])
        for column, values in enumerate(measured[: len(titles)], 1):
            figure.add_bar(
                x=values, y=[one.model for one in own], orientation="h", name=kind, legendgroup=kind,
                showlegend=column == 1, marker={"color": COLOURS[position]}, row=1, col=column,
            )  # fmt: skip
    figure.update_yaxes(autorange="reversed", automargin=True)
    return figure
