"""Figures of PowerNorm (Shen et al., ICML 2020)."""

import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from normkit.watch import Series
from normkit_papers.report import canvas
from normkit_papers.report.canvas import safe
from normkit_papers.report.recorded import (
    BATCH_NORMS,
    Drawn,
    Recorded,
    first_sites,
    highest,
    limit,
    plot_series,
    short,
    titled,
    with_quantities,
)
from normkit_papers.report.settings import job
from normkit_papers.tasks import METRICS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEAN = r"$\frac{1}{d}\,\|\mu_B - \mu\|$"
VARIANCE = r"$\frac{1}{d}\,\|\sigma_B^2 - \sigma^2\|$"
QUADRATIC = r"$\frac{1}{d}\,\|\psi_B^2 - \psi^2\|$"
G_MEAN, G_VARIANCE, G_QUADRATIC = (rf"$\frac{{1}}{{d}}\,\|g_{{{name}}}\|$" for name in (r"\mu", r"\sigma^2", r"\psi^2"))
QUARTILES = ("min", "q25", "median", "q75", "max")
SINGULAR = re.compile(r"singular_value\[(\d+)\]")


def figure2(runs: Sequence[Recorded]) -> Drawn:
    """Draw distances of batch and running mean and variance in the first BatchNorm."""
    return _pair(runs, {"distance_mean": MEAN, "distance_var": VARIANCE})


def figure3(runs: Sequence[Recorded]) -> Drawn:
    """Draw the norms of gradients through mean and variance in the first BatchNorm."""
    return _pair(runs, {"g_mu": G_MEAN, "g_sigma2": G_VARIANCE})


def figure4(runs: Sequence[Recorded]) -> Drawn:
    """Draw distances and gradients of BatchNorm's variance and PN-V's quadratic mean."""
    runs = with_quantities(runs, "distance_var", "distance_quadratic", "g_sigma2", "g_psi2")
    kinds = (("BN", BATCH_NORMS, ("distance_var", "g_sigma2")), ("PN-V", ("pnv",), ("distance_quadratic", "g_psi2")))
    names = {"distance_var": VARIANCE, "distance_quadratic": QUADRATIC, "g_sigma2": G_VARIANCE, "g_psi2": G_QUADRATIC}
    figure = canvas.figure(7.0, 4.4)
    panels, used = figure.subplots(2, 2, sharex=True, sharey="col"), list[Recorded]()
    for row, (norm, prefixes, quantities) in zip(panels, kinds, strict=True):
        for axes, quantity in zip(row, quantities, strict=True):
            for number, (run, site) in enumerate(first_sites(runs, quantity, *prefixes)):
                plot_series(axes, run, run.recording.of(quantity)[site], number)
                used.append(run)
            axes.set_ylabel(names[quantity])
        there = any(run.sites(quantities[0], *prefixes) for run in runs)
        row[0].legend(title=norm if there else f"all norms, for lack of {norm}", fontsize=7, title_fontsize=8)
    for column in (0, 1):
        limit(max((row[column] for row in panels), key=highest))
    _percent(panels[1])
    return figure, used


def figure5(runs: Sequence[Recorded]) -> Drawn:
    """Draw the score by batch size, a line for each norm; the runs are those of one data set."""
    for metric, data in itertools.product(METRICS, dict.fromkeys(job(run.result) for run in runs)):
        lines: dict[str, list[tuple[int, float]]] = {}
        used: list[Recorded] = []
        for run in runs:
            value = (run.result["scores"].get("running") or {}).get(metric.key)
            if value is not None and run.settings.get("batch_tokens") and job(run.result) == data:
                lines.setdefault(str(run.settings["model"]["norm"]), []).append((run.settings["batch_tokens"], value))
                used.append(run)
        if any(len({size for size, _ in line}) > 1 for line in lines.values()):
            break
    else:
        raise ValueError("none of these norms was trained and scored with two sizes of batch on one data set; run "
                         "`normkit study pn.figure5`, or `normkit train` with several --batch-tokens")  # fmt: skip
    figure = canvas.figure(4.4, 3.0)
    axes = figure.add_subplot()
    for number, (norm, points) in enumerate(lines.items()):
        sizes = sorted({size for size, _ in points})
        means = [sum(v for s, v in points if s == size) / sum(s == size for s, _ in points) for size in sizes]
        axes.plot(sizes, means, marker="osD^v<>"[number % 7], label=safe(norm), **canvas.line_style(number))
    axes.set(xscale="log", xlabel="Batch size (tokens in each batch)", ylabel=metric.name)
    every = sorted({size for points in lines.values() for size, _ in points})
    axes.set_xticks(every, [f"{size:,}" for size in every])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    return figure, used


def figure6(runs: Sequence[Recorded]) -> Drawn:
    """Draw singular values of the embedding after training, the largest being 1."""
    found = []
    for run in runs:
        sites: dict[str, dict[int, float]] = {}
        for quantity, series in run.recording.quantities.items():
            if match := SINGULAR.fullmatch(quantity):
                for site, each in series.items():
                    if points := each.points():
                        sites.setdefault(site, {})[int(match[1])] = points[-1][1]
        if sites:
            found.append((run, next(iter(sites.values()))))
    if not found:
        raise ValueError("none of these runs recorded singular_value[i], the singular values of its embedding; "
                         "they are taken at the end of a run that records them")  # fmt: skip
    figure = canvas.figure(4.4, 3.0)
    axes = figure.add_subplot()
    for number, (run, line) in enumerate(found):
        places = sorted(line)
        top = max(line.values()) or 1.0
        axes.plot(places, [line[i] / top for i in places], label=safe(run.label), **canvas.line_style(number))
    axes.set(xlabel="The index of singular value", ylabel="Normalized singular value", ylim=(0, 1.02))
    axes.legend(fontsize=8)
    return figure, [run for run, _ in found]


def figure7(runs: Sequence[Recorded]) -> Drawn:
    """Draw the distribution over channels of gamma / psi_B after training, by norm."""
    quantities = [f"gamma_over_psi_{name}" for name in QUARTILES]
    runs = with_quantities(runs, *quantities)
    run = first_sites(runs, quantities[0], "pnv")[0][0]
    sites = run.complete_sites(quantities, "pnv")
    figure = canvas.figure(1.4 + 0.42 * len(sites), 3.4)
    axes = figure.add_subplot()
    boxes = []
    for site in sites:
        ends = [_last(run.recording.of(quantity)[site]) for quantity in quantities]
        boxes.append(dict(zip(("whislo", "q1", "med", "q3", "whishi"), ends, strict=True)) | {"fliers": []})
    axes.bxp(boxes, patch_artist=True, boxprops={"facecolor": "none", "edgecolor": canvas.COLOURS[0]},
             medianprops={"color": canvas.COLOURS[1]}, whiskerprops={"color": canvas.COLOURS[0]},
             capprops={"color": canvas.COLOURS[0]})  # fmt: skip
    axes.axhline(1, color=canvas.INK, linewidth=0.8, linestyle="dashed")
    axes.set_xticks(
        range(1, len(sites) + 1), [safe(short(site)) for site in sites], rotation=50, ha="right", fontsize=7
    )
    axes.set(ylabel=r"$\gamma\,/\,\psi_B$", ylim=(0, None))
    titled(axes, run.label)
    return figure, [run]


def _pair(runs: Sequence[Recorded], quantities: dict[str, str]) -> Drawn:
    """Draw a panel for each quantity of the first BatchNorm, a line for each run."""
    runs = with_quantities(runs, *quantities)
    figure = canvas.figure(7.0, 3.0)
    panels, used = figure.subplots(1, 2, sharex=True), list[Recorded]()
    for axes, (quantity, name) in zip(panels, quantities.items(), strict=True):
        for number, (run, site) in enumerate(first_sites(runs, quantity, *BATCH_NORMS)):
            plot_series(axes, run, run.recording.of(quantity)[site], number)
            used.append(run)
        axes.set_ylabel(name)
        limit(axes)
    _percent(panels)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=2, fontsize=8)
    return figure, used


def _percent(panels: "Sequence[Axes]") -> None:
    for axes in panels:
        axes.set(xlabel="Percent of training", xlim=(0, 100))


def _last(series: Series) -> float:
    """The last finite value; 0 without one."""
    points = series.points()
    return points[-1][1] if points else 0.0
