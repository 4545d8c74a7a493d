"""Runs as figures see them: settings, scores and recorded rows, and what is said where something is missing."""

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit.lab.report.canvas import look
from normkit.lab.report.curves import extremes
from normkit.lab.report.rows import Rows, Values, read
from normkit.lab.report.settings import Result, Results, groups, job, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SKIP = 0.05
LETTERS = 16  # of a title, to an inch
POINTS = 200  # of a line at most
BATCH_NORMS = ("batch", "BatchNorm", "renorm", "SyncBatchNorm")
HOW = (
    "record with `normkit train RECIPE --record-every 5`, or, what has to be asked for (pnac_...), with "
    "`normkit.record(model, quantities='all')`; cka and singular values are measured at the end, see normkit.watch; "
    "rows.csv must lie beside result.json or run.json"
)


class Recorded(NamedTuple):
    """A run: its label, its result, and its rows."""

    label: str
    result: Result
    rows: Rows

    @property
    def settings(self) -> Any:
        """What was trained."""
        return self.result["run"]

    @property
    def steps(self) -> int:
        """Length of the training."""
        return max(1, int(self.settings.get("steps", 0)) or self.last)

    @property
    def last(self) -> int:
        """The last step that was recorded."""
        return max((step for values in self.rows.values.values() for step in values), default=0)

    def has(self, *quantities: str) -> bool:
        """Whether these were recorded somewhere."""
        kinds = {kind for kind, _ in self.rows.values}
        return kinds.issuperset(quantities)

    def sites(self, quantity: str, *norms: str) -> dict[str, Values]:
        """A quantity by site, at norms whose names begin so; at all where none is named."""
        found = self.rows.of(quantity)
        return {site: v for site, v in found.items() if not norms or self.rows.norms[site].startswith(norms)}


def recorded(results: Results) -> list[Recorded]:
    """The runs, each with a label that tells it from the others; ValueError for rows that cannot be read."""
    kinds = groups(results)
    return [
        Recorded(f"{job(result)[1]}: {name}" if len(kinds) > 1 else name, result, read(folder))
        for kind in kinds
        for (folder, result), name in zip(kind.items(), labels(kind).values(), strict=True)
    ]


def able(runs: Sequence[Recorded], *quantities: str) -> list[Recorded]:
    """The runs that recorded all of these; ValueError, naming what is missing, where there are none."""
    found = [run for run in runs if run.has(*quantities)]
    if not found:
        missing = [name for name in quantities if not any(run.has(name) for run in runs)] or quantities
        raise ValueError(f"none of these runs recorded {' and '.join(missing)}; {HOW}")
    return found


def standing(runs: Sequence[Recorded], quantity: str, *norms: str) -> list[tuple[Recorded, str]]:
    """The runs where such a norm stands, and its first place; where none has one, all runs and their first norms."""
    having = [(run, next(iter(sites))) for run in runs if (sites := run.sites(quantity, *norms))]
    return having or [(run, next(iter(run.sites(quantity)))) for run in runs]


def trace(axes: "Axes", run: Recorded, values: Values, number: int, **more: Any) -> None:
    """A quantity over the percent of training, outliers kept."""
    known = [(step, value) for step, value in sorted(values.items()) if value is not None and math.isfinite(value)]
    steps, heights = extremes([step for step, _ in known], [value for _, value in known], POINTS)
    style = {**look(number), "linewidth": 0.8, "label": safe(run.label), **more}
    axes.plot([100 * step / run.steps for step in steps], heights, **style)


def highest(axes: "Axes") -> float:
    """The highest value after the first twentieth of training: before it, running statistics just start."""
    points = [point for line in axes.get_lines() for point in line.get_path().vertices]  # type: ignore[union-attr]
    return max((float(y) for x, y in points if x >= 100 * SKIP), default=0.0)


def limit(axes: "Axes") -> None:
    """Scale an axis from 0 to what is highest after the first twentieth of training."""
    axes.set_ylim(0, 1.05 * highest(axes) or None)


def safe(text: str) -> str:
    """Text that matplotlib takes as it is."""
    return text.replace("$", r"\$")


def titled(axes: "Axes", text: str) -> None:
    """Write a title, on as many lines as the panel's width asks for."""
    wide = axes.get_figure(root=True).get_size_inches()[0] * axes.get_position().width * LETTERS  # type: ignore[union-attr]
    axes.set_title("\n".join(textwrap.wrap(safe(text), max(12, int(wide)), break_long_words=False)), fontsize=9)


def short(site: str) -> str:
    """A place in a model, without what all places have.

    >>> short("encoder.layers.0.attention_norm")
    'encoder.0.attention'
    """
    return site.replace(".layers.", ".").removesuffix("_norm").removeprefix("model.")
