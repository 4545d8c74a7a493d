"""Figures of PowerNorm (Shen et al., ICML 2020)."""

import re
import statistics
from collections.abc import Sequence

from normkit.watch import Series
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
    short,
    with_quantities,
)
from normkit_papers.report.settings import job
from normkit_papers.tasks import METRICS

NAMES = {
    "distance_mean": "‖μ_B - μ‖ / d",
    "distance_var": "‖σ²_B - σ²‖ / d",
    "distance_quadratic": "‖ψ²_B - ψ²‖ / d",
    "g_mu": "‖g_μ‖ / d",
    "g_sigma2": "‖g_σ²‖ / d",
    "g_psi2": "‖g_ψ²‖ / d",
}
PERCENT = "percent of training"
QUARTILES = tuple(f"gamma_over_psi_{name}" for name in ("min", "q25", "median", "q75", "max"))
SINGULAR = re.compile(r"singular_value\[(\d+)\]")


def figure2(runs: Sequence[Recorded]) -> Drawn:
    """Draw distances of batch and running mean and variance in the first BatchNorm."""
    return _first_norms(runs, [[("distance_mean", BATCH_NORMS), ("distance_var", BATCH_NORMS)]])


def figure3(runs: Sequence[Recorded]) -> Drawn:
    """Draw the norms of gradients through mean and variance in the first BatchNorm."""
    return _first_norms(runs, [[("g_mu", BATCH_NORMS), ("g_sigma2", BATCH_NORMS)]])


def figure4(runs: Sequence[Recorded]) -> Drawn:
    """Draw distances and gradients of BatchNorm's variance and PN-V's quadratic mean."""
    upper: list[tuple[str, tuple[str, ...]]] = [("distance_var", BATCH_NORMS), ("g_sigma2", BATCH_NORMS)]
    return _first_norms(runs, [upper, [("distance_quadratic", ("pnv",)), ("g_psi2", ("pnv",))]])


def _first_norms(runs: Sequence[Recorded], grid: list[list[tuple[str, tuple[str, ...]]]]) -> Drawn:
    """Draw a panel for each quantity of the first norm of some kinds, a line for each run."""
    runs = with_quantities(runs, *(quantity for line in grid for quantity, _ in line))
    figure, used = panels(len(grid), len(grid[0]), shared_xaxes=True), list[Recorded]()
    for row, line in enumerate(grid, 1):
        for column, (quantity, kinds) in enumerate(line, 1):
            for run, site in first_sites(runs, quantity, *kinds):
                points = in_percent(run, run.recording.of(quantity)[site])
                add_line(figure, points, run.label, runs.index(run), row, column)
                used.append(run)
            limit(figure, row, column, title=NAMES[quantity])
            figure.update_xaxes(title=PERCENT if row == len(grid) else None, range=[0, 100], row=row, col=column)
    return figure, used


def figure5(runs: Sequence[Recorded]) -> Drawn:
    """Draw the score by batch size, a line for each norm; the runs are those of one data set."""
    for metric in METRICS:
        for data in dict.fromkeys(job(run.result) for run in runs):
            lines: dict[str, dict[int, list[float]]] = {}
            used = []
            for run in runs:
                value = (run.result["scores"].get("running") or {}).get(metric.key)
                if value is not None and run.settings.get("batch_tokens") and job(run.result) == data:
                    sizes = lines.setdefault(str(run.settings["model"]["norm"]), {})
                    sizes.setdefault(run.settings["batch_tokens"], []).append(value)
                    used.append(run)
            if any(len(sizes) > 1 for sizes in lines.values()):
                figure = panels(1, 1)
                for number, (norm, sizes) in enumerate(lines.items()):
                    points = [(size, statistics.fmean(sizes[size])) for size in sorted(sizes)]
                    add_line(figure, points, norm, number, mode="lines+markers")
                figure.update_xaxes(type="log", title="batch size (tokens in each batch)")
                figure.update_yaxes(title=metric.name)
                return figure, used
    raise ValueError(
        "none of these norms was trained and scored with two sizes of batch on one data set; run "
        "`papers study pn.figure5`, or `papers train` with several --batch-tokens"
    )


def figure6(runs: Sequence[Recorded]) -> Drawn:
    """Draw singular values of the embedding after training, the largest being 1."""
    figure, used = panels(1, 1), list[Recorded]()
    for run in runs:
        sites: dict[str, dict[int, float]] = {}
        for quantity, series in run.recording.quantities.items():
            if match := SINGULAR.fullmatch(quantity):
                for site, each in series.items():
                    if points := each.points():
                        sites.setdefault(site, {})[int(match[1])] = points[-1][1]
        if sites:
            line = next(iter(sites.values()))
            top = max(line.values()) or 1.0
            add_line(figure, [(place, line[place] / top) for place in sorted(line)], run.label, len(used))
            used.append(run)
    if not used:
        raise ValueError("none of these runs recorded singular_value[i], which are taken at the end of a run")
    figure.update_xaxes(title="index of the singular value")
    figure.update_yaxes(title="normalized singular value", range=[0, 1.02])
    return figure, used


def figure7(runs: Sequence[Recorded]) -> Drawn:
    """Draw the distribution over channels of gamma / psi_B after training, by norm."""
    runs = with_quantities(runs, *QUARTILES)
    run = first_sites(runs, QUARTILES[0], "pnv")[0][0]
    sites = run.complete_sites(QUARTILES, "pnv")
    low, q1, median, q3, high = ([_last(run.recording.of(name)[site]) for site in sites] for name in QUARTILES)
    figure = panels(1, 1, [run.label], height=400)
    ends = {"lowerfence": low, "q1": q1, "median": median, "q3": q3, "upperfence": high}
    figure.add_box(x=[short(site) for site in sites], **ends, marker={"color": COLOURS[0]}, showlegend=False)
    figure.add_hline(1, line={"dash": "dash", "color": "#808080"})
    figure.update_yaxes(title="gamma / ψ_B", rangemode="tozero")
    return figure, [run]


def _last(series: Series) -> float:
    """The last finite value; 0 without one."""
    points = series.points()
    return points[-1][1] if points else 0.0
