"""Pictures of results, as PNG or SVG by the suffix of the path; the same files give the same bytes."""

import io
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.report import distances
from normkit.report.lines import losses
from normkit.report.results import write_whole
from normkit.report.settings import Results, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers tell apart; yellow, which white paper swallows, is left out
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
DASHES = ("solid", "dashed", "dotted", "dashdot")
SUFFIXES = (".png", ".svg")
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "normkit",
    "svg.fonttype": "none",  # text stays text: small files, and a page can search it
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.unicode_minus": False,
}
DECADE = 10
SKIP = 0.05  # of a run: where the scale of its losses begins
ROOM = 0.055  # of an axis: height of a label


def curves(results: Results, path: str | Path) -> Path:
    """Learning curves: loss on the training batches and, where runs were validated more than once, on the valid split.

    Scales begin after the first twentieth of each run; a line that ends early is of a run that diverged.
    """
    path = _checked(path)
    names = labels(results)
    found = {folder: losses(result) for folder, result in results.items()}
    series = {
        title: {folder: list(zip(*run[title], strict=True)) for folder, run in found.items()}
        for title in ("training loss", "validation loss")
    }
    series = {title: lines for title, lines in series.items() if any(len(line) > 1 for line in lines.values())}
    if not series:
        raise ValueError("no learning curve: none of these results has two losses")
    with _style():
        figure = _figure(5.2 * len(series), 3.6)
        for place, (title, lines) in enumerate(series.items()):
            axes = figure.add_subplot(1, len(series), place + 1)
            ends = []
            for number, (folder, line) in enumerate(lines.items()):
                if line:
                    steps, values = zip(*line, strict=True)
                    marker = "o" if len(line) <= 20 else None
                    axes.plot(steps, values, marker=marker, markersize=2.5, linewidth=1.3, **_look(number))
                    ends.append((values[-1], names[folder], _look(number)))
            axes.set(title=title, xlabel="step", yscale="log")
            _limits(axes, list(lines.values()))
            _ticks(axes)
            _label_ends(axes, ends)
        return _save(figure, path)


def statistics(results: Results, path: str | Path) -> Path:
    """How far the statistics of batches stray from the running ones, (1/d) ||batch - running|| (PowerNorm, Figure 2).

    A panel for each norm and statistic, all on one scale; a thin line for each place in the model, a thick one for
    their median. ValueError where no run has recorded any.
    """
    path = _checked(path)
    panels = distances.panels(results)
    if not panels:
        raise ValueError(f"no statistics: none of these runs has a {distances.FILE} with distances in it")
    numbers = {folder: number for number, folder in enumerate(map(Path, results))}
    across = min(3, len(panels))
    down = math.ceil(len(panels) / across)
    with _style():
        figure = _figure(3.2 * across + 0.3, 2.4 * down + 0.3)
        first = None
        for place, panel in enumerate(panels):
            axes = figure.add_subplot(down, across, place + 1, sharex=first, sharey=first)
            first = first or axes
            colour = COLOURS[numbers[panel.folder] % len(COLOURS)]
            for values in panel.sites.values():
                axes.plot(panel.steps, _drawable(values), color=colour, alpha=0.3, linewidth=0.6)
            axes.plot(panel.steps, _drawable(panel.median()), color=colour, linewidth=1.8)
            axes.set_title(panel.title, fontsize=9)
            axes.set_yscale("log")
            axes.tick_params(labelleft=place % across == 0, labelbottom=place + across >= len(panels))
            _ticks(figure.axes[0])
        figure.supxlabel("step", fontsize=9)
        figure.supylabel("(1/d) ||batch - running||", fontsize=9)
        return _save(figure, path)


def _drawable(values: Sequence[float | None]) -> list[float]:
    return [value if value is not None and value > 0 else math.nan for value in values]


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def _limits(axes: "Axes", lines: Sequence[Sequence[tuple[int, float]]]) -> None:
    """Show the losses after the beginning, so that what tells the runs apart fills the picture."""
    last = max(step for line in lines for step, _ in line)
    later = [loss for line in lines for step, loss in line if step >= SKIP * last and loss > 0]
    if later and min(later) < max(later):
        axes.set_ylim(min(later) * 0.98, max(later) * 1.02)


def _ticks(axes: "Axes") -> None:
    """Plain numbers, also where the axis covers less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator() if high / low > DECADE else MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _label_ends(axes: "Axes", ends: Sequence[tuple[float, str, dict[str, Any]]]) -> None:
    """Write each line's name at its right end, apart from each other, behind a piece of the line."""
    bottom, top = (math.log(limit) for limit in axes.get_ylim())
    heights = [min(max((math.log(value) - bottom) / (top - bottom), 0), 1) if value > 0 else 0 for value, *_ in ends]
    for height, (_, name, look) in zip(spread(heights, ROOM), ends, strict=True):
        axes.plot((1.01, 1.04), (height, height), transform=axes.transAxes, clip_on=False, **look)
        axes.annotate(name.replace("$", r"\$"), (1.05, height), xycoords="axes fraction", va="center", fontsize=8)


def spread(heights: Sequence[float], room: float) -> list[float]:
    """Heights moved as little as is needed to be `room` apart, in the same order.

    >>> spread([0.5, 0.5, 0.0], 0.25)
    [0.375, 0.625, 0.0]
    """
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    blocks: list[tuple[float, list[int]]] = []  # mean height, members
    for i in order:
        blocks.append((heights[i], [i]))
        while len(blocks) > 1:
            (low, lows), (high, highs) = blocks[-2:]
            if high - low >= room * (len(lows) + len(highs)) / 2:
                break
            members = lows + highs
            mean = (low * len(lows) + high * len(highs)) / len(members)
            blocks[-2:] = [(mean, members)]
    out = list(heights)
    for mean, members in blocks:
        for place, i in enumerate(members):
            out[i] = mean + (place - (len(members) - 1) / 2) * room
    return out


def _checked(path: str | Path) -> Path:
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'}; pictures are {' or '.join(SUFFIXES)}")
    return path


def _style() -> AbstractContextManager[None]:
    import matplotlib as mpl

    return mpl.rc_context(STYLE)


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: "Figure", path: Path) -> Path:
    data, kind = io.BytesIO(), path.suffix[1:]
    figure.savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return write_whole(path, data.getvalue())
