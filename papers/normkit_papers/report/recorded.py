"""Runs as the papers' figures use them: label, settings, scores and recorded values."""

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit.watch.recording import Recording, Series
from normkit.watch.row_files import read_run
from normkit_papers.report.canvas import line_style, safe
from normkit_papers.report.curves import extremes
from normkit_papers.report.settings import Result, Results, groups, job, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SKIP = 0.05  # part of the training after which scales begin: running statistics have just started before
LETTERS = 16  # of a title, to an inch
POINTS = 200  # of a line at most
BATCH_NORMS = ("batch", "BatchNorm", "renorm", "SyncBatchNorm")
HOW = (
    "some quantities exist for some norms only (docs/figures.md lists the runs that each figure needs); "
    "record with `normkit train RECIPE --record-every 5`, or the expensive quantities (pnac_...) with "
    "`normkit.record(model, quantities='all')`; cka and singular values are measured at the end, see normkit.watch; "
    "rows.csv must lie beside result.json or run.json"
)


class Recorded(NamedTuple):
    """A run: its label, its result, and its recorded values."""

    label: str
    result: Result
    recording: Recording

    @property
    def settings(self) -> Any:
        """Settings of the run."""
        return self.result["run"]

    @property
    def steps(self) -> int:
        """Length of the training."""
        return max(1, int(self.settings.get("steps", 0)) or self.recording.last_step())

    def sites(self, quantity: str, *norms: str) -> dict[str, Series]:
        """A quantity by site, at norms whose names begin with one of these, else at all sites."""
        found = self.recording.of(quantity)
        return {site: s for site, s in found.items() if not norms or self.recording.sites[site].startswith(norms)}

    def complete_sites(self, quantities: Sequence[str], *norms: str) -> list[str]:
        """The sites with all of these quantities, at such norms if there are any.

        Raises:
            ValueError: if there is no such site, as in a run in progress that has not written its first step whole.
        """
        every = [self.recording.of(quantity) for quantity in quantities]
        some = self.sites(quantities[0], *norms) or every[0]
        if sites := [site for site in some if all(site in each for each in every)]:
            return sites
        raise ValueError(f"{self.label} has no norm yet with all of {', '.join(quantities)}; wait for its next step")


Drawn = tuple["Figure", Sequence[Recorded]]
"""A figure, and the runs that it shows."""


def recorded(results: Results) -> list[Recorded]:
    """The runs, each with a label of its own; ValueError for rows that cannot be read."""
    kinds = groups(results)
    return [
        Recorded(f"{job(result)[1]}: {name}" if len(kinds) > 1 else name, result, read_run(folder))
        for kind in kinds
        for (folder, result), name in zip(kind.items(), labels(kind).values(), strict=True)
    ]


def with_quantities(runs: Sequence[Recorded], *quantities: str) -> list[Recorded]:
    """The runs that recorded all of these quantities.

    Raises:
        ValueError: if no run did; the message names what is missing and how to record it.
    """
    found = [run for run in runs if run.recording.quantities.keys() >= set(quantities)]
    if not found:
        missing = [name for name in quantities if not any(name in run.recording.quantities for run in runs)]
        raise ValueError(f"none of these runs recorded {' and '.join(missing or quantities)}; {HOW}")
    return found


def first_sites(runs: Sequence[Recorded], quantity: str, *norms: str) -> list[tuple[Recorded, str]]:
    """The runs with such a norm, and its first site; without any, all with their first norm."""
    having = [(run, next(iter(sites))) for run in runs if (sites := run.sites(quantity, *norms))]
    return having or [(run, next(iter(run.sites(quantity)))) for run in runs]


def plot_series(axes: "Axes", run: Recorded, series: Series, number: int, **more: Any) -> None:
    """Draw a quantity over the percent of training; thinning keeps outliers."""
    points = series.points()
    steps, heights = extremes([step for step, _ in points], [value for _, value in points], POINTS)
    style = {**line_style(number), "linewidth": 0.8, "label": safe(run.label), **more}
    axes.plot([100 * step / run.steps for step in steps], heights, **style)


def highest(axes: "Axes") -> float:
    """The highest value after the first twentieth of training."""
    points = [point for line in axes.get_lines() for point in line.get_path().vertices]  # type: ignore[union-attr]
    return max((float(y) for x, y in points if x >= 100 * SKIP), default=0.0)


def limit(axes: "Axes") -> None:
    """Scale an axis from 0 to the highest value after the first twentieth of training."""
    axes.set_ylim(0, 1.05 * highest(axes) or None)


def titled(axes: "Axes", text: str) -> None:
    """Write a title, on as many lines as the width of the panel needs."""
    wide = axes.get_figure(root=True).get_size_inches()[0] * axes.get_position().width * LETTERS  # type: ignore[union-attr]
    axes.set_title("\n".join(textwrap.wrap(safe(text), max(12, int(wide)), break_long_words=False)), fontsize=9)


def short(site: str) -> str:
    """Shorten a site by the parts that all sites have.

    >>> short("encoder.layers.0.attention_norm")
    'encoder.0.attention'
    """
    return site.replace(".layers.", ".").removesuffix("_norm").removeprefix("model.")
