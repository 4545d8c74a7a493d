"""Charts of a page: losses and recorded statistics of runs."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normkit_papers.report.recorded import COLOURS, Recorded, add_line, panels
from normkit_papers.report.summary import Group

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PART = 50  # a training loss is averaged over a fiftieth of the run
FIRST = ("loss", "rms", "largest", "similarity", "gap_batch", "gap_quadratic", "gradient_norm")
"""Quantities that a reader wants to see first; the others follow by name."""


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


def folding(groups: Sequence[Group]) -> "list[Figure]":
    """Draw time and size of each model, as trained and folded, if any is folded."""
    drawn = []
    for name, scale, title in (
        ("seconds", 1000, "milliseconds to decode 64 words, one thread"),
        ("megabytes", 1, "megabytes of weights"),
    ):
        if not any(group.fold(f"{name}_folded") for group in groups):
            continue
        figure = panels(1, 1, [title], height=60 + 44 * len(groups))
        for colour, kind in zip(COLOURS, ("trained", "folded"), strict=False):
            values = [value and scale * value for value in (group.fold(f"{name}_{kind}") for group in groups)]
            style: dict[str, Any] = {"orientation": "h", "texttemplate": "%{x:.3g}", "textposition": "inside"}
            figure.add_bar(x=values, y=[group.label for group in groups], name=kind, marker_color=colour, **style)
        figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix=" ")
        drawn.append(figure)
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
    """Draw each recorded quantity: a line for each run, or for each norm of a single run.

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
