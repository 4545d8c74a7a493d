"""Figure: distance of batch means from the running ones, by batch length."""

from collections.abc import Sequence

from normkit_papers.report import canvas
from normkit_papers.report.recorded import SKIP, Drawn, Recorded, titled, with_quantities


def draw_length(runs: Sequence[Recorded]) -> Drawn:
    """Draw the distance of each batch's mean by the batch's length, a panel a run.

    The distance is that of the first norm, in standard deviations. Colours are lengths at the last norm, which are
    those of targets where an encoder comes first.
    """
    runs = with_quantities(runs, "drift_mean", "length")[:4]
    tables = [_points(run) for run in runs]
    colours = [colour for table in tables for *_, colour in table] or [0.0]
    figure = canvas.figure(2.2 * len(runs) + 1.0, 2.8)
    panels = figure.subplots(1, len(runs), sharex=True, sharey=True, squeeze=False)[0]
    for axes, run, table in zip(panels, runs, tables, strict=True):
        x, y, c = zip(*table, strict=True) if table else ((), (), ())
        axes.scatter(x, y, s=7, c=c, cmap="cividis", vmin=min(colours), vmax=max(colours))
        axes.set_xlabel("Length at the first norm")
        titled(axes, run.label)
    panels[0].set_ylabel(r"rms of $(\mu_B - \mu) / \sigma$")
    panels[0].set_ylim(0)
    figure.colorbar(panels[0].collections[0], ax=list(panels), label="Length at the last norm")
    return figure, runs


def _points(run: Recorded) -> list[tuple[float, float, float]]:
    """Length and distance at the first norm, and length at the last, of each batch."""
    lengths = [dict(series.points()) for series in run.recording.of("length").values()]
    distances = dict(next(iter(run.recording.of("drift_mean").values())).points())
    steps = [step for step in distances if step > SKIP * run.steps and all(step in each for each in lengths)]
    return [(lengths[0][step], distances[step], lengths[-1][step]) for step in steps]
