"""Runs as figures use them, with their recorded values; panels and lines of charts."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from normkit.watch import Recording, Series, read_run
from normkit_papers.report.settings import Result, Results, labels

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SKIP = 0.05  # part of the training after which scales begin: running statistics have just started before
POINTS = 300  # of a line at most
# Okabe and Ito's palette, which colour-blind readers can distinguish; all can be seen on white and on black
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#7F7F7F")
DASHES = ("solid", "dash", "dot", "dashdot")
BATCH_NORMS = ("batch", "BatchNorm", "renorm", "SyncBatchNorm")
HOW = (
    "some quantities exist for some norms only; record with `papers train RECIPE --record-every 5`, or the expensive "
    "ones (pnac_...) with `--quantities all`; rows.csv must lie beside result.json"
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
        """A quantity by site, at norms whose names begin with one of these; without names at all sites."""
        found = self.recording.of(quantity)
        return {site: s for site, s in found.items() if not norms or self.recording.sites[site].startswith(norms)}

    def complete_sites(self, quantities: Sequence[str], *norms: str) -> list[str]:
        """The sites with all of these quantities, at such norms; ValueError without one."""
        every = [self.sites(quantity, *norms) for quantity in quantities]
        if sites := [site for site in every[0] if all(site in each for each in every)]:
            return sites
        raise ValueError(f"{self.label} has no norm with all of {', '.join(quantities)}")


Drawn = tuple["Figure", Sequence[Recorded]]
"""A figure, and the runs that it shows."""


def recorded(results: Results) -> list[Recorded]:
    """The runs with their labels and recordings; seeds of one run get different labels."""
    names = labels(results)
    common = list(names.values())
    return [
        Recorded(
            f"{name}, seed={result['run'].get('seed')}" if common.count(name) > 1 else name, result, read_run(folder)
        )
        for (folder, result), name in zip(results.items(), names.values(), strict=True)
    ]


def with_quantities(runs: Sequence[Recorded], *quantities: str) -> list[Recorded]:
    """The runs that recorded all of these quantities.

    Raises:
        ValueError: If no run did; the message names what is missing and how to record it.
    """
    found = [run for run in runs if run.recording.quantities.keys() >= set(quantities)]
    if not found:
        missing = [name for name in quantities if not any(name in run.recording.quantities for run in runs)]
        raise ValueError(f"none of these runs recorded {' and '.join(missing or quantities)}; {HOW}")
    return found


def first_sites(runs: Sequence[Recorded], quantity: str, *norms: str) -> list[tuple[Recorded, str]]:
    """The runs with such a norm, and its first site; ValueError without one."""
    if having := [(run, next(iter(sites))) for run in runs if (sites := run.sites(quantity, *norms))]:
        return having
    raise ValueError(f"none of these runs recorded {quantity} at a norm of the figure: {', '.join(norms)}")


def panels(rows: int, columns: int, titles: Sequence[str] = (), height: int = 300, **more: Any) -> "Figure":
    """Create a figure of several panels, in the style of all charts."""
    from plotly.subplots import make_subplots

    figure = make_subplots(rows, columns, subplot_titles=[_wrapped(title) for title in titles], **more)
    legend = {"orientation": "h", "yanchor": "top", "y": -50 / (height * rows)}  # below: it may take many lines
    margin = {"l": 60, "r": 20, "t": 40, "b": 90}
    figure.update_layout(template="none", height=130 + height * rows, legend=legend, margin=margin)
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"color": "#808080"})
    figure.update_xaxes(gridcolor="rgba(128,128,128,.25)", zeroline=False)
    figure.update_yaxes(gridcolor="rgba(128,128,128,.25)", zeroline=False)
    figure.update_annotations(font={"size": 13})
    return figure


def _wrapped(title: str, width: int = 44) -> str:
    import textwrap

    return "<br>".join(textwrap.wrap(title, width))


def add_line(
    figure: "Figure",
    points: Iterable[tuple[float, float]],
    name: str,
    number: int,
    row: int = 1,
    column: int = 1,
    **more: Any,
) -> None:
    """Add a line to a panel; lines of one name share colour and entry in the legend."""
    known = any(trace.name == name for trace in figure.data)  # pyright: ignore[reportAttributeAccessIssue]
    x, y = zip(*extremes(list(points), POINTS), strict=True)
    line = {"color": COLOURS[number % len(COLOURS)], "dash": DASHES[number // len(COLOURS) % len(DASHES)], "width": 1.5}
    mode = "lines" if len(x) > 1 else "markers"
    style: dict[str, Any] = {"mode": mode, "legendgroup": name, "showlegend": not known, "line": line}
    figure.add_scatter(x=x, y=y, name=name, row=row, col=column, **{**style, **more})


def in_percent(run: Recorded, series: Series) -> list[tuple[float, float]]:
    """The points of a series over the percent of training."""
    return [(100 * step / run.steps, value) for step, value in series.points()]


def limit(figure: "Figure", row: int, column: int, **panel: Any) -> None:
    """Scale a panel from 0 to its highest value after the first twentieth of training."""
    traces = list(figure.select_traces(row=row, col=column))
    highest = max((y for trace in traces for x, y in zip(trace.x, trace.y, strict=True) if x >= 100 * SKIP), default=0)  # pyright: ignore[reportAttributeAccessIssue]
    figure.update_yaxes(range=[0, 1.05 * highest or 1], row=row, col=column, **panel)


def extremes(points: list[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """Keep at most `count` points, the lowest and the highest of each stretch.

    >>> extremes([(0, 1.0), (1, 9.0), (2, 2.0), (3, 2.0), (4, 0.0), (5, 3.0)], 4)
    [(0, 1.0), (1, 9.0), (4, 0.0), (5, 3.0)]
    """
    if len(points) <= count:
        return points
    parts, chosen = max(1, count // 2), list[tuple[float, float]]()
    for part in range(parts):
        inside = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        chosen += sorted({min(inside, key=lambda point: point[1]), max(inside, key=lambda point: point[1])})
    return chosen


def short(site: str) -> str:
    """Shorten a site by the parts that all sites have.

    >>> short("encoder.layers.0.attention_norm")
    'encoder.0.attention'
    """
    return site.replace(".layers.", ".").removesuffix("_norm").removeprefix("model.")
