"""Figures of Unified Normalization (Yang et al., ACM MM 2022)."""

from collections.abc import Sequence

from normkit.norms import make
from normkit_papers.report.recorded import (
    COLOURS,
    Drawn,
    Recorded,
    add_line,
    in_percent,
    panels,
    short,
    with_quantities,
)
from normkit_papers.report.settings import job
from normkit_papers.tears.figures import validated_by, validation

PARTS = (1 / 3, 2 / 3, 1.0)  # of training: the paper's 12, 24 and 36 epochs
DIM = 64  # channels of a norm that is built only to read whether it folds; any number works
LAYERS = 3  # layers of Figure 4: the first, one in the middle, the last
PNAC = ("pnac_activation", "pnac_gradient")
PERCENT = "percent of training"


def figure1(runs: Sequence[Recorded]) -> Drawn:
    """Draw validation scores, a panel for each task; runs that keep norms have dashed lines."""
    tasks: dict[tuple[str, str], list[Recorded]] = {}
    for run in runs:
        if len(run.result["valid"]) > 1:
            tasks.setdefault(job(run.result), []).append(run)
    validated_by(runs)
    titles = [f"{' on '.join(task)}; dashed: norms stay at inference" for task in tasks]
    figure, used = panels(1, len(tasks), titles), list[Recorded]()
    for column, members in enumerate(tasks.values(), 1):
        key, title = validated_by(members)
        for number, run in enumerate(members):
            if points := validation(run, key):
                line = {"color": COLOURS[number % len(COLOURS)], "dash": "solid" if folds_away(run) else "dash"}
                add_line(figure, points, run.label, number, column=column, line=line)
                used.append(run)
        figure.update_xaxes(title="step", col=column)
        figure.update_yaxes(title=title, col=column)
    return figure, used


def folds_away(run: Recorded) -> bool:
    """Return True if all norms of a run can be folded into other layers after its training."""
    model = run.settings["model"]
    try:
        norms = [make(spec, DIM) for spec in {model["norm"], *(model.get("norm_at") or {}).values()}]
    except ValueError:  # a norm of another version of normkit
        return False
    return all(norm.offline for norm in norms)


def figure3(runs: Sequence[Recorded]) -> Drawn:
    """Draw PNAC of activation and gradient, averaged over layers, a panel for each run."""
    runs = with_quantities(runs, *PNAC)
    figure = panels(1, len(runs), [run.label for run in runs], shared_yaxes=True)
    for column, run in enumerate(runs, 1):
        for number, quantity in enumerate(PNAC):
            by_step: dict[float, list[float]] = {}
            for series in run.sites(quantity).values():
                for x, value in in_percent(run, series):
                    by_step.setdefault(x, []).append(value)
            means = [(x, sum(values) / len(values)) for x, values in sorted(by_step.items())]
            add_line(figure, means, quantity.removeprefix("pnac_"), number, column=column, mode="lines+markers")
    figure.update_xaxes(title=PERCENT, range=[0, 100])
    figure.update_yaxes(range=[0, 102])
    figure.update_yaxes(title="PNAC (%)", col=1)
    return figure, runs


def figure4(runs: Sequence[Recorded]) -> Drawn:
    """Draw one channel's statistics in three layers of a run, with their means over a window."""
    rows = (
        ("channel_activation", "channel_activation_am", "channel_activation_gm"),
        ("channel_gradient", "channel_gradient_am"),
    )
    names = {"": "statistic of the batch", "_am": "arithmetic mean", "_gm": "geometric mean"}
    run = with_quantities(runs, *rows[0], *rows[1])[0]
    sites = run.complete_sites((*rows[0], *rows[1]))
    sites = [sites[round(part * (len(sites) - 1) / (LAYERS - 1))] for part in range(LAYERS)] if sites[2:] else sites
    figure = panels(2, len(sites), [short(site) for site in sites], 240, shared_xaxes=True)
    for row, quantities in enumerate(rows, 1):
        for column, site in enumerate(sites, 1):
            for number, quantity in enumerate(quantities):
                points = in_percent(run, run.recording.of(quantity)[site])
                add_line(figure, points, names[quantity.removeprefix(quantities[0])], 3 - number, row, column)
    figure.update_xaxes(title=f"{PERCENT}, {run.label}", row=2)
    figure.update_yaxes(title="activation, σ²", row=1, col=1)
    figure.update_yaxes(title="gradient, g_ψ²", row=2, col=1)
    return figure, [run]


def figure5(runs: Sequence[Recorded]) -> Drawn:
    """Draw the steps that outlier filtration dropped, by layer and time, a panel for each run."""
    runs = with_quantities(runs, "filtered")
    figure = panels(len(runs), 1, [f"{run.label}, {run.steps:,} steps" for run in runs])
    for row, run in enumerate(runs, 1):
        sites = run.sites("filtered")
        for number, part in enumerate(PARTS):
            heights = [
                next((value for step, value in reversed(series.points()) if step <= part * run.steps), 0.0)
                for series in sites.values()
            ]
            name, style = f"after {part:.0%} of the steps", {"color": COLOURS[number]}
            places = [short(site) for site in sites]
            figure.add_bar(
                x=places, y=heights, name=name, marker=style, legendgroup=name, showlegend=row == 1, row=row, col=1
            )
    figure.update_yaxes(title="steps dropped")
    return figure, runs


def figure6(runs: Sequence[Recorded]) -> Drawn:
    """Draw CKA between the layers "a|b" of two models as a map, a panel for each run.

    `papers study un.figure6` trains such runs and measures them.
    """
    runs = with_quantities(runs, "cka")
    figure = panels(1, len(runs), [run.label for run in runs], 360)
    for column, run in enumerate(runs, 1):
        cells = {
            tuple(site.split("|", 1)): series.values[-1] for site, series in run.sites("cka").items() if "|" in site
        }
        down, across = (list(dict.fromkeys(pair[side] for pair in cells)) for side in (0, 1))
        grid = [[cells.get((a, b)) for b in across] for a in down]
        figure.add_heatmap(z=grid, x=across, y=down, zmin=0, zmax=1, colorscale="Cividis", row=1, col=column,
                           showscale=column == len(runs), colorbar={"title": "CKA"})  # fmt: skip
    figure.update_xaxes(title="layer of this model, by depth", showticklabels=False)
    figure.update_yaxes(showticklabels=False)
    figure.update_yaxes(title="layer of the model with LN, by depth", col=1)
    return figure, runs


def figure7(runs: Sequence[Recorded]) -> Drawn:
    """Draw PNAC by depth at the beginning and the end of training, a point a window."""
    run = with_quantities(runs, *PNAC)[0]
    parts = {"beginning of training": (0, 30), "end of training": (70, 100)}
    figure = panels(1, 2, list(parts), shared_yaxes=True)
    for column, (low, high) in enumerate(parts.values(), 1):
        for number, quantity in enumerate(PNAC):
            points = [
                (place + 0.3 * number - 0.15, value)
                for place, series in enumerate(run.sites(quantity).values(), 1)
                for x, value in in_percent(run, series)
                if low <= x <= high
            ]
            if points:
                add_line(figure, points, quantity.removeprefix("pnac_"), number, column=column, mode="markers")
    figure.update_xaxes(title=f"norm, by depth ({run.label})")
    figure.update_yaxes(title="PNAC (%)", range=[-2, 102], col=1)
    return figure, [run]
