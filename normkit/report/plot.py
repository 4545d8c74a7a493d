"""Pictures of results, as PNG or SVG by the suffix of the path; matplotlib is imported when one is drawn."""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normkit.report.summary import Results

# Okabe and Ito's palette: told apart by colour-blind readers, and in print by the marks
COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("-", "--", "-", "-.", "-", "--", "-.", ":")
STYLE = {
    "svg.hashsalt": "normkit",
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean of each value and those before it, `window` at most.

    >>> smooth([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    out = []
    for i in range(len(values)):
        part = values[max(0, i + 1 - window) : i + 1]
        out.append(sum(part) / len(part))
    return out


def curves(results: Results, path: str | Path) -> Path:
    """Learning curves: training loss (smoothed over 2% of the run) on the left, validation loss on the right."""
    plt = _pyplot()
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharex=True)
        for number, (title, result) in enumerate(results.items()):
            look = _look(number)
            steps = [point["step"] for point in result["curve"]]
            losses = smooth([point["train_loss"] for point in result["curve"]], max(1, len(steps) // 50))
            left.plot(steps, losses, label=title, **look)
            right.plot([p["step"] for p in result["valid"]], [p["loss"] for p in result["valid"]], **look)
        left.set(xlabel="step", ylabel="training loss", yscale="log")
        right.set(xlabel="step", ylabel="validation loss, running statistics", yscale="log")
        finite = [point["loss"] for r in results.values() for point in r["valid"] if math.isfinite(point["loss"])]
        if finite:  # a norm that fails leaves the others readable
            right.set_ylim(0.95 * min(finite), min(1.05 * max(finite), 8 * min(finite)))
        for axes in (left, right):
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(NullFormatter())
        figure.legend(
            *left.get_legend_handles_labels(), loc="outside upper center", ncols=min(6, len(results)), frameon=False
        )
        return _save(figure, path)


def statistics(rows: Mapping[str, Sequence[Mapping[str, Any]]], path: str | Path) -> Path:
    """How far each batch's statistics stray from the running ones, `(1/d) ||batch - running||` (PowerNorm, Figure 2).

    One panel a norm, in the order of `rows` (see `read_rows`); a line a quantity, the median over the norms of the
    model, the band from the least to the most.
    """
    rows = {title: found for title, found in rows.items() if found}
    if not rows:
        raise ValueError("no statistics were recorded: none of these runs has a norm with running statistics")
    plt = _pyplot()
    with plt.rc_context(STYLE):
        across = min(4, len(rows))
        down = math.ceil(len(rows) / across)
        figure, grid = plt.subplots(
            down, across, figsize=(2.5 * across + 0.6, 2.4 * down + 0.5), sharex=True, sharey=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for axes in grid.flat[len(rows) :]:
            axes.set_visible(False)
        quantities = list(dict.fromkeys(row["quantity"] for found in rows.values() for row in found))
        for axes, (title, found) in zip(grid.flat, rows.items(), strict=False):
            for number, quantity in enumerate(quantities):
                by_step: dict[int, list[float]] = {}
                for row in found:
                    if row["quantity"] == quantity and row["value"] > 0:
                        by_step.setdefault(row["step"], []).append(row["value"])
                if not by_step:
                    continue
                steps = sorted(by_step)
                ordered = [sorted(by_step[step]) for step in steps]
                look = _look(number + 1)
                axes.plot(steps, [v[len(v) // 2] for v in ordered], label=quantity.removeprefix("distance_"), **look)
                axes.fill_between(
                    steps, [v[0] for v in ordered], [v[-1] for v in ordered], color=look["color"], alpha=0.15, lw=0
                )
            axes.set(title=title, yscale="log")
        figure.supxlabel("step", fontsize=9)
        figure.supylabel("(1/d) ||batch - running||", fontsize=9)
        found = {
            label: line for axes in grid.flat for line, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=len(found), frameon=False)
        return _save(figure, path)


def read_rows(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's rows.csv (step, site, norm, quantity, value); none where there is no such file."""
    path = Path(folder) / "rows.csv"
    if not path.is_file():
        return []
    with path.open(newline="", encoding="utf8") as file:
        try:
            return [{**row, "step": int(row["step"]), "value": float(row["value"])} for row in csv.DictReader(file)]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is no table of step, site, norm, quantity, value: {error}") from None


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number % len(DASHES)], "linewidth": 1.4}


def _save(figure: Any, path: str | Path) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if path.suffix == ".svg" else None
    figure.savefig(path, dpi=150, metadata=metadata, facecolor="white")
    _pyplot().close(figure)
    return path


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    return plt
