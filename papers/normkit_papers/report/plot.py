"""Figures of results, as PNG or SVG by the suffix of the path.

The same files give the same bytes.
"""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normkit.watch.row_files import FILE
from normkit_papers.report import canvas
from normkit_papers.report.curves import extremes, losses
from normkit_papers.report.panels import panels
from normkit_papers.report.settings import Results, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = 120  # of a thin line
SKIP = 0.05  # of a run: where the scale of its losses begins


def curves(results: Results, path: str | Path) -> Path:
    """Draw learning curves: loss in training and, if measured twice, on the valid split.

    Scales begin after the first twentieth of each run; a line that ends early belongs to a run that diverged.
    """
    path = canvas.figure_path(path)
    names = list(labels(results).values())
    found = list(map(losses, results.values()))
    series = {title: [run[title] for run in found] for title in ("training loss", "validation loss")}
    series = {title: lines for title, lines in series.items() if any(len(steps) > 1 for steps, _ in lines)}
    if not series:
        raise ValueError("no learning curve: none of these results has two losses")
    with canvas.style():
        figure = canvas.figure(5.2 * len(series), 3.6)
        for place, (title, lines) in enumerate(series.items()):
            axes = figure.add_subplot(1, len(series), place + 1)
            ends = []
            for number, (steps, values) in enumerate(lines):
                if steps:
                    marker = "o" if len(steps) <= 20 else None
                    axes.plot(steps, values, marker=marker, markersize=2.5, linewidth=1.3, **canvas.line_style(number))
                    ends.append((values[-1], names[number], canvas.line_style(number)))
            axes.set(title=title, xlabel="step", yscale="log")
            _limits(axes, lines)
            canvas.ticks(axes)
            canvas.label_ends(axes, ends)
        return canvas.save(figure, path)


def statistics(results: Results, path: str | Path) -> Path:
    """Draw (1/d) ||batch - running|| of statistics over training (PowerNorm, Figure 2).

    A panel for each norm and statistic, all on one scale; a thin line for each site, a thick one for their median.
    ValueError if no run has recorded any.
    """
    path = canvas.figure_path(path)
    shown = panels(results)
    if not shown:
        raise ValueError(f"no statistics: none of these runs has a {FILE} with distances in it")
    numbers = {folder: number for number, folder in enumerate(map(Path, results))}
    across = min(3, len(shown))
    down = math.ceil(len(shown) / across)
    with canvas.style():
        figure = canvas.figure(3.2 * across + 0.3, 2.4 * down + 0.3)
        first = None
        for place, panel in enumerate(shown):
            axes = figure.add_subplot(down, across, place + 1, sharex=first, sharey=first)
            first = first or axes
            colour = canvas.COLOURS[numbers[panel.folder] % len(canvas.COLOURS)]
            for values in panel.sites.values():
                points = extremes(panel.steps, [value or 0.0 for value in values], POINTS)
                axes.plot(points[0], canvas.drawable(points[1]), color=colour, alpha=0.3, linewidth=0.6)
            marker = "o" if len(panel.steps) <= 20 else None
            axes.plot(
                panel.steps, canvas.drawable(panel.median()), color=colour, linewidth=1.8, marker=marker, markersize=2.5
            )
            axes.set_title(canvas.safe("\n".join(textwrap.wrap(panel.title, 44))), fontsize=9)
            axes.set_yscale("log")
            axes.tick_params(labelleft=place % across == 0, labelbottom=place + across >= len(shown))
            canvas.ticks(figure.axes[0])
        figure.supxlabel("step", fontsize=9)
        figure.supylabel("(1/d) ||batch - running||", fontsize=9)
        return canvas.save(figure, path)


def _limits(axes: "Axes", lines: Sequence[tuple[list[int], list[float]]]) -> None:
    """Scale to the losses after the beginning, where runs differ."""
    points = [point for line in lines for point in zip(*line, strict=True)]
    last = max(step for step, _ in points)
    later = [loss for step, loss in points if step >= SKIP * last and loss > 0]
    if later and min(later) < max(later):
        axes.set_ylim(min(later) * 0.98, max(later) * 1.02)
