"""Palette, style, labels and files of all figures."""

import io
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit._util import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can distinguish; without yellow, which is faint on white paper
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
DASHES = ("solid", "dashed", "dotted", "dashdot")
SUFFIXES = (".png", ".svg")
PAPER, INK, GRID = "#ffffff", "#1b1c1e", "#dddddd"
DARK = {  # colours on a dark screen
    PAPER: "#15171a",
    INK: "#e7e7e5",
    GRID: "#3d4248",
    "#0072b2": "#56b4e9",
    "#d55e00": "#e8743b",
    "#009e73": "#1fbf90",
    "#cc79a7": "#d68fb8",
    "#56b4e9": "#f0e442",
    "#000000": "#ffffff",
}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "normkit",
    "svg.fonttype": "none",  # text stays text: small files, and a page can search it
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "axes.unicode_minus": False,
    "legend.frameon": False,
}
DECADE = 10
LONGEST = 32  # characters of a name beside a line
LABEL_HEIGHT = 0.055  # of an axis


def drawable(values: Sequence[float | None]) -> list[float]:
    """Replace values that a logarithmic axis cannot show by nan."""
    return [value if value is not None and value > 0 else math.nan for value in values]


def line_style(number: int) -> dict[str, Any]:
    """Colour and dash of a line, by its number."""
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": DASHES[number // len(COLOURS) % len(DASHES)]}


def ticks(axes: "Axes") -> None:
    """Label an axis with plain numbers, also if it covers less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator() if high / low > DECADE else MaxNLocator(6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def label_ends(axes: "Axes", ends: Sequence[tuple[float, str, dict[str, Any]]]) -> None:
    """Label each line at its right end, without overlap, behind a piece of the line."""
    bottom, top = (math.log(limit) for limit in axes.get_ylim())
    heights = [min(max((math.log(value) - bottom) / (top - bottom), 0), 1) if value > 0 else 0 for value, *_ in ends]
    for height, (_, name, style) in zip(spread(heights, LABEL_HEIGHT), ends, strict=True):
        axes.plot((1.01, 1.04), (height, height), transform=axes.transAxes, clip_on=False, **style)
        text = name if len(name) <= LONGEST else name[: LONGEST - 1] + "\N{HORIZONTAL ELLIPSIS}"
        axes.annotate(safe(text), (1.05, height), xycoords="axes fraction", va="center", fontsize=8)


def spread(heights: Sequence[float], distance: float) -> list[float]:
    """Move heights as little as possible until they are `distance` apart, in the same order.

    >>> spread([0.5, 0.5, 0.0], 0.25)
    [0.375, 0.625, 0.0]
    """
    import numpy as np
    from scipy.optimize import isotonic_regression

    order, steps = np.argsort(heights, kind="stable"), distance * np.arange(len(heights))
    found = np.empty(len(heights))
    found[order] = isotonic_regression(np.asarray(heights)[order] - steps).x + steps
    return found.tolist()


def safe(text: str) -> str:
    """Escape text that matplotlib would read as a formula."""
    return text.replace("$", r"\$")


def figure_path(path: str | Path) -> Path:
    """Return the path of a figure; ValueError unless it ends in .png or .svg."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path} ends in {path.suffix or 'nothing'}; figures are {' or '.join(SUFFIXES)}")
    return path


def style() -> AbstractContextManager[None]:
    """Apply the style of all figures within a context."""
    import matplotlib as mpl

    return mpl.rc_context(STYLE)


def figure(width: float, height: float) -> "Figure":
    """Create an empty figure; sizes in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: "Figure", path: Path) -> Path:
    """Write a figure, whole or not at all; an SVG turns dark on a dark screen."""
    data, kind = io.BytesIO(), path.suffix[1:]
    figure.savefig(data, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else {"Software": None})
    return write_whole(path, for_screens(data.getvalue().decode()).encode() if kind == "svg" else data.getvalue())


def for_screens(svg: str) -> str:
    """Add the colours for a dark screen to an SVG file, and remove digits that cannot be seen.

    >>> '"fill: #1b1c1e"]{fill:#e7e7e5!important}' in for_screens("<svg><text style='fill: #1b1c1e'/></svg>")
    True
    """
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
        if f"{what}: {light}" in svg
    )
    svg = re.sub(r"(?<= )-?\d+\.\d{3,}(?=[ \n\"])", lambda number: f"{float(number[0]):.2f}", svg)
    return svg.replace("</svg>", f"<style>@media (prefers-color-scheme:dark){{{rules}}}</style></svg>")
