"""Figures of the papers, drawn from result files and rows of any runs."""

import re
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from normkit._util import pick
from normkit.norms import make
from normkit_papers.report.recorded import (
    BATCH_NORMS,
    COLOURS,
    Drawn,
    Recorded,
    add_line,
    first_sites,
    in_percent,
    limit,
    panels,
    recorded,
    short,
    with_quantities,
)  # fmt: skip
from normkit_papers.report.settings import Results, job
from normkit_papers.studies.catalogue import STUDIES
from normkit_papers.tasks import METRICS, Metric

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

PERCENT = "percent of training"
QUARTILES = tuple(f"gamma_over_psi_{name}" for name in ("min", "q25", "median", "q75", "max"))
PNAC = ("pnac_activation", "pnac_gradient")
PARTS = (1 / 3, 2 / 3, 1.0)  # of training: the 12, 24 and 36 epochs of UN's paper
DIM = 64  # channels of a norm that is built only to read whether it folds; any number works
LAYERS = 3  # of UN's Figure 4: the first, one in the middle, the last
VALIDATED = {"bleu": "BLEU on the validation split", "loss": "loss on the validation split"}
SMOOTHING = "label_smoothing"
SUBLAYERS = {  # names of norms in our models: Tears' names of sublayers
    "encoder": {"attention_norm": "encoder attention", "feedforward_norm": "encoder feed-forward"},
    "decoder": {
        "self_norm": "decoder self-attention",
        "attention_norm": "decoder self-attention",
        "cross_norm": "decoder-encoder attention",
        "feedforward_norm": "decoder feed-forward",
    },
}
Runs = Sequence[Recorded]

# -- PowerNorm --------------------------------------------------------------------------------------------------------

AXES = {
    "distance_mean": "‖μ_B - μ‖ / d",
    "distance_var": "‖σ²_B - σ²‖ / d",
    "distance_quadratic": "‖ψ²_B - ψ²‖ / d",
    "g_mu": "‖g_μ‖ / d",
    "g_sigma2": "‖g_σ²‖ / d",
    "g_psi2": "‖g_ψ²‖ / d",
}


def _first_norms(*grid: dict[str, tuple[str, ...]]) -> Callable[[Runs], Drawn]:
    """Draw a panel for each quantity of the first norm of some kinds; a dictionary is a row."""

    def draw(runs: Runs) -> Drawn:
        runs = with_quantities(runs, *(quantity for line in grid for quantity in line))
        figure, used = panels(len(grid), len(grid[0]), shared_xaxes=True), list[Recorded]()
        for row, line in enumerate(grid, 1):
            for column, (quantity, kinds) in enumerate(line.items(), 1):
                for run, site in first_sites(runs, quantity, *kinds):
                    points = in_percent(run, run.recording.of(quantity)[site])
                    add_line(figure, points, run.label, runs.index(run), row, column)
                    used.append(run)
                limit(figure, row, column, title=AXES[quantity])
                figure.update_xaxes(title=PERCENT if row == len(grid) else None, range=[0, 100], row=row, col=column)
        return figure, used

    return draw


def _by_batch_size(runs: Runs) -> Drawn:
    """Draw a line for each norm; the runs are those of one data set."""
    lines: dict[tuple[Metric, tuple[str, str]], dict[str, dict[int, list[Recorded]]]] = {}
    for run in runs:
        for metric in METRICS:
            if metric.key in (run.result["scores"].get("running") or {}) and run.settings.get("batch_tokens"):
                norms = lines.setdefault((metric, job(run.result)), {})
                sizes = norms.setdefault(str(run.settings["model"]["norm"]), {})
                sizes.setdefault(run.settings["batch_tokens"], []).append(run)
    for (metric, _), norms in sorted(lines.items(), key=lambda item: METRICS.index(item[0][0])):
        if any(len(sizes) > 1 for sizes in norms.values()):
            figure = panels(1, 1)
            for number, (norm, sizes) in enumerate(norms.items()):
                means = {size: statistics.fmean(run.result["scores"]["running"][metric.key] for run in members)
                         for size, members in sorted(sizes.items())}  # fmt: skip
                add_line(figure, means.items(), norm, number, mode="lines+markers")
            figure.update_xaxes(type="log", title="batch size (tokens in each batch)")
            figure.update_yaxes(title=metric.name)
            return figure, [run for sizes in norms.values() for members in sizes.values() for run in members]
    raise ValueError(
        "none of these norms was trained and scored with two sizes of batch on one data set; run "
        "`papers study pn.figure5`, or `papers train` with several --batch-tokens"
    )


def _singular_values(runs: Runs) -> Drawn:
    """Draw a line for each run: the values of its first embedding."""
    runs = with_quantities(runs, "singular_value[0]")
    figure = panels(1, 1)
    for number, run in enumerate(runs):
        site, line = next(iter(run.recording.of("singular_value[0]"))), list[tuple[float, float]]()
        for quantity, series in run.recording.quantities.items():
            if (match := re.fullmatch(r"singular_value\[(\d+)\]", quantity)) and site in series:
                line.append((int(match[1]), series[site].points()[-1][1]))
        top = max(value for _, value in line) or 1.0
        add_line(figure, [(index, value / top) for index, value in sorted(line)], run.label, number)
    figure.update_xaxes(title="index of the singular value")
    figure.update_yaxes(title="normalized singular value", range=[0, 1.02])
    return figure, runs


def _gamma_over_psi(runs: Runs) -> Drawn:
    runs = with_quantities(runs, *QUARTILES)
    run = first_sites(runs, QUARTILES[0], "pnv")[0][0]
    sites, ends = run.complete_sites(QUARTILES, "pnv"), list[list[float]]()
    for name in QUARTILES:
        series = [run.recording.of(name)[site].points() for site in sites]
        ends.append([points[-1][1] if points else 0.0 for points in series])
    figure = panels(1, 1, [run.label], height=400)
    boxes = dict(zip(("lowerfence", "q1", "median", "q3", "upperfence"), ends, strict=True))
    figure.add_box(x=[short(site) for site in sites], **boxes, marker={"color": COLOURS[0]}, showlegend=False)
    figure.add_hline(1, line={"dash": "dash", "color": "#808080"})
    figure.update_yaxes(title="gamma / ψ_B", rangemode="tozero")
    return figure, [run]


# -- Transformers without Tears ---------------------------------------------------------------------------------------


def _gradient_norms(runs: Runs) -> Drawn:
    """Draw a panel for each run, on one scale; before clipping."""
    runs = with_quantities(runs, "gradient_norm")
    across = min(2, len(runs))
    down = -(-len(runs) // across)
    figure = panels(down, across, [run.label for run in runs], 220, shared_xaxes=True, shared_yaxes="all")
    for number, run in enumerate(runs):
        points = run.recording.of("gradient_norm")[""].points()
        add_line(figure, points, run.label, number, number // across + 1, number % across + 1)
    figure.update_layout(showlegend=False)
    figure.update_xaxes(title="step", row=down)
    figure.update_yaxes(title="gradient norm", col=1)
    return figure, runs


def _learned_g(runs: Runs) -> Drawn:
    """Draw a panel for each kind of sublayer, at the end of training."""
    runs = with_quantities(runs, "learned_g")
    lines: dict[str, dict[int, list[tuple[int, float]]]] = {}
    for number, run in enumerate(runs):
        for site, series in run.sites("learned_g").items():
            place = _place(site)
            if place is not None and (points := series.points()):
                lines.setdefault(place[0], {}).setdefault(number, []).append((place[1], points[-1][1]))
    if not lines:
        raise ValueError("none of the recorded norms is in a numbered layer of an encoder or a decoder")
    figure = panels(1, len(lines), list(lines), shared_yaxes=True)
    for column, by_run in enumerate(lines.values(), 1):
        for number, points in by_run.items():
            add_line(figure, sorted(points), runs[number].label, number, column=column, mode="lines+markers")
    figure.update_xaxes(title="layer", dtick=1)
    figure.update_yaxes(title="g", col=1)
    return figure, [run for number, run in enumerate(runs) if any(number in by_run for by_run in lines.values())]


def _learned_g_by_smoothing(runs: Runs) -> Drawn:
    runs = with_quantities(runs, "learned_g")
    if len({bool(run.settings.get(SMOOTHING)) for run in runs}) < 2:
        raise ValueError("this compares runs with and without label smoothing; train one with --label-smoothing 0")
    named = [f"{run.label}, {SMOOTHING}={run.settings.get(SMOOTHING, 0)}" for run in runs]
    return _learned_g([
        run if SMOOTHING in run.label else run._replace(label=name) for run, name in zip(runs, named, strict=True)
    ])  # fmt: skip


def _place(site: str) -> tuple[str, int] | None:
    """Kind of sublayer and number of the layer, from 1.

    >>> _place("decoder.layers.0.cross_norm")
    ('decoder-encoder attention', 1)
    """
    parts = site.split(".")
    number = next((int(part) for part in parts if part.isdecimal()), None)
    for side, kinds in SUBLAYERS.items():
        if side in parts and number is not None and parts[-1] in kinds:
            return kinds[parts[-1]], number + 1
    return None


# -- Unified Normalization --------------------------------------------------------------------------------------------


def _validations(dashed: bool) -> Callable[[Runs], Drawn]:
    """Draw validation scores, a panel for each task; if `dashed`, runs that keep norms are dashed."""

    def draw(runs: Runs) -> Drawn:
        tasks: dict[tuple[str, str], list[Recorded]] = {}
        for run in runs:
            if len(run.result["valid"]) > 1:
                tasks.setdefault(job(run.result), []).append(run)
        if not tasks:
            raise ValueError("none of these runs was validated twice; train with --valid-every")
        note = "; dashed: norms stay at inference" * dashed
        figure = panels(1, len(tasks), [f"{' on '.join(task)}{note}" for task in tasks])
        for column, members in enumerate(tasks.values(), 1):
            every = [point for run in members for point in run.result["valid"]]
            key = next(key for key in VALIDATED if any(key in point for point in every))
            for number, run in enumerate(members):
                points = [(point["step"], point[key]) for point in run.result["valid"] if key in point]
                style = {"color": COLOURS[number % len(COLOURS)], "dash": "solid" if folds_away(run) else "dash"}
                more: Any = {"line": style} if dashed else {"mode": "lines+markers"}
                if points:
                    add_line(figure, points, run.label, number, column=column, **more)
            figure.update_xaxes(title="step", col=column)
            figure.update_yaxes(title=VALIDATED[key], col=column)
        return figure, [run for members in tasks.values() for run in members]

    return draw


def folds_away(run: Recorded) -> bool:
    """Return True if all norms of a run can be folded into other layers after its training."""
    model = run.settings["model"]
    try:
        norms = [make(spec, DIM) for spec in {model["norm"], *(model.get("norm_at") or {}).values()}]
    except ValueError:  # a norm of another version of normkit
        return False
    return all(norm.offline for norm in norms)


def _pnac(runs: Runs) -> Drawn:
    """Draw a panel for each run."""
    runs = with_quantities(runs, *PNAC)
    figure = panels(1, len(runs), [run.label for run in runs], shared_yaxes=True)
    for column, run in enumerate(runs, 1):
        for number, quantity in enumerate(PNAC):
            by_step: dict[float, list[float]] = {}
            for series in run.sites(quantity).values():
                for x, value in in_percent(run, series):
                    by_step.setdefault(x, []).append(value)
            means = [(x, statistics.fmean(values)) for x, values in sorted(by_step.items())]
            add_line(figure, means, quantity.removeprefix("pnac_"), number, column=column, mode="lines+markers")
    figure.update_xaxes(title=PERCENT, range=[0, 100])
    figure.update_yaxes(range=[0, 102])
    figure.update_yaxes(title="PNAC (%)", col=1)
    return figure, runs


def _one_channel(runs: Runs) -> Drawn:
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


def _filtered(runs: Runs) -> Drawn:
    """Draw a panel for each run."""
    runs = with_quantities(runs, "filtered")
    figure = panels(len(runs), 1, [f"{run.label}, {run.steps:,} steps" for run in runs])
    for row, run in enumerate(runs, 1):
        sites = run.sites("filtered")
        for number, part in enumerate(PARTS):
            heights = [
                next((value for step, value in reversed(series.points()) if step <= part * run.steps), 0.0)
                for series in sites.values()
            ]
            name = f"after {part:.0%} of the steps"
            style = {"name": name, "legendgroup": name, "showlegend": row == 1, "marker": {"color": COLOURS[number]}}
            figure.add_bar(x=[short(site) for site in sites], y=heights, row=row, col=1, **style)
    figure.update_yaxes(title="steps dropped")
    return figure, runs


def _similarity(runs: Runs) -> Drawn:
    """Draw a map for each run, from sites "a|b" that `papers study un.figure6` records."""
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


def _pnac_by_depth(runs: Runs) -> Drawn:
    """Draw a point a window."""
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


FIGURES: dict[str, Callable[[Runs], Drawn]] = {
    "pn.figure2": _first_norms({"distance_mean": BATCH_NORMS, "distance_var": BATCH_NORMS}),
    "pn.figure3": _first_norms({"g_mu": BATCH_NORMS, "g_sigma2": BATCH_NORMS}),
    "pn.figure4": _first_norms(
        {"distance_var": BATCH_NORMS, "g_sigma2": BATCH_NORMS}, {"distance_quadratic": ("pnv",), "g_psi2": ("pnv",)}
    ),
    "pn.figure5": _by_batch_size,
    "pn.figure6": _singular_values,
    "pn.figure7": _gamma_over_psi,
    "tears.figure1": _validations(dashed=False),
    "tears.figure2": _gradient_norms,
    "tears.figure3": _learned_g,
    "tears.figure4": _learned_g_by_smoothing,
    "un.figure1": _validations(dashed=True),
    "un.figure3": _pnac,
    "un.figure4": _one_channel,
    "un.figure5": _filtered,
    "un.figure6": _similarity,
    "un.figure7": _pnac_by_depth,
}
"""By name, as of a study; what draws it from runs."""


def title(name: str) -> str:
    """What a figure shows: the title of its study; Figure 7 of UN has none, as it is drawn from any run."""
    if name == "un.figure7":
        return "PNAC by layer, at the beginning and at the end of training"
    return STUDIES[name].title


def draw(name: str, results: Results) -> "tuple[Figure, list[str]]":
    """Draw a figure from the runs that recorded its quantities.

    Args:
        name: Name of the figure, such as "pn.figure2".
        results: Results by folder.

    Returns:
        The figure, and the labels of runs that it does not show.

    Raises:
        ValueError: For an unknown figure, or if no run recorded what it needs; the message names that.
    """
    drawing = pick(FIGURES, name, "figure")
    try:
        runs = recorded(results)
        figure, used = drawing(runs)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    shown = {id(run.result) for run in used}
    return figure, [run.label for run in runs if id(run.result) not in shown]
