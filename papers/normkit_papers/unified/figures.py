"""Figures of Unified Normalization (Yang et al., ACM MM 2022)."""

from collections.abc import Sequence

from normkit.norms import make
from normkit.watch.recording import Series
from normkit_papers.report import canvas
from normkit_papers.report.canvas import safe
from normkit_papers.report.curves import thin
from normkit_papers.report.recorded import Drawn, Recorded, plot_series, short, titled, with_quantities
from normkit_papers.report.settings import job
from normkit_papers.tears.figures import validated_by

PARTS = (1 / 3, 2 / 3, 1.0)  # of training: the paper's 12, 24 and 36 epochs
DIM = 64  # channels of a norm that is built only to read whether it folds; any number works
LAYERS = 3  # layers of Figure 4: the first, one in the middle, the last
BEGIN, END = 0.3, 0.7  # Figure 7: parts of training


def figure1(runs: Sequence[Recorded]) -> Drawn:
    """Draw validation scores, a panel for each task; runs that keep norms have dashed lines."""
    tasks: dict[tuple[str, str], list[Recorded]] = {}
    for run in runs:
        if len(run.result["valid"]) > 1:
            tasks.setdefault(job(run.result), []).append(run)
    validated_by(runs)
    figure, used = canvas.figure(3.7 * len(tasks), 3.0), list[Recorded]()
    for place, (task, members) in enumerate(tasks.items()):
        axes = figure.add_subplot(1, len(tasks), place + 1)
        key, title = validated_by(members)
        for number, run in enumerate(members):
            points = [(point["step"], point[key]) for point in run.result["valid"] if key in point]
            if not points:
                continue
            dash = "solid" if folds_away(run) else "dashed"
            colour = canvas.line_style(number)["color"]
            axes.plot(*zip(*points, strict=True), color=colour, linestyle=dash, label=safe(run.label))
            used.append(run)
        axes.set(title=safe(" on ".join(task)), xlabel="step", ylabel=title)
        axes.legend(fontsize=7, title="dashed: norms stay at inference", title_fontsize=7)
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
    runs = with_quantities(runs, "pnac_activation", "pnac_gradient")
    figure = canvas.figure(2.9 * len(runs) + 0.4, 2.9)
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, run in zip(panels, runs, strict=True):
        for number, (kind, marker) in enumerate((("activation", "o"), ("gradient", "s"))):
            means = _mean_over_sites(run, f"pnac_{kind}")
            steps = [100 * step / run.steps for step in means]
            axes.plot(steps, list(means.values()), marker=marker, markersize=4, label=kind, **canvas.line_style(number))
        axes.set(xlim=(0, 100), ylim=(0, 102))
        titled(axes, run.label)
    panels[0].set_ylabel("PNAC (%)")
    figure.supxlabel("Percent of training", fontsize=9)
    panels[0].legend(fontsize=8)
    return figure, runs


def figure4(runs: Sequence[Recorded]) -> Drawn:
    """Draw one channel's statistics in three layers of a run, with their means over a window."""
    activation = ("channel_activation", "channel_activation_am", "channel_activation_gm")
    gradient = ("channel_gradient", "channel_gradient_am")
    run = with_quantities(runs, *activation, *gradient)[0]
    sites = thin(run.complete_sites((*activation, *gradient)), LAYERS)
    figure = canvas.figure(2.6 * len(sites) + 0.4, 4.2)
    panels = figure.subplots(2, len(sites), sharex=True, squeeze=False)
    styles = {
        "": (3, 0.5, "statistic of the batch"),
        "_am": (1, 1.2, "arithmetic mean (AM)"),
        "_gm": (0, 1.2, "geometric mean (GM)"),
    }
    for row, quantities in zip(panels, (activation, gradient), strict=True):
        for axes, site in zip(row, sites, strict=True):
            for quantity in quantities:
                number, width, label = styles[quantity.removeprefix(quantities[0])]
                plot_series(axes, run, run.recording.of(quantity)[site], number, linewidth=width, label=label)
            axes.margins(x=0)
    for axes, site in zip(panels[0], sites, strict=True):
        axes.set_title(safe(short(site)), fontsize=9)
        axes.set_ylim(bottom=0)
    panels[0, 0].set_ylabel(r"activation, $\sigma_t^2$")
    panels[1, 0].set_ylabel(r"gradient, $g_{\psi^2}$")
    figure.supxlabel(f"Percent of training, {safe(run.label)}", fontsize=9)
    handles, names = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=8)
    return figure, [run]


def figure5(runs: Sequence[Recorded]) -> Drawn:
    """Draw the steps that outlier filtration dropped, by layer and time, a panel for each run."""
    runs = with_quantities(runs, "filtered")
    shown = [(run, run.sites("filtered")) for run in runs]
    most = max(len(sites) for _, sites in shown)
    figure = canvas.figure(1.2 + 0.42 * most, 2.4 * len(shown) + 0.5)
    panels = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, (run, sites) in zip(panels, shown, strict=True):
        for number, part in enumerate(PARTS):
            heights = [_at(series, part * run.steps) for series in sites.values()]
            places = [i + 0.27 * (number - 1) for i in range(len(sites))]
            label = f"after {part:.0%} of {run.steps:,} steps"
            axes.bar(places, heights, width=0.25, color=canvas.COLOURS[number], label=label)
        axes.set_xticks(range(len(sites)), [safe(short(site)) for site in sites], rotation=50, ha="right", fontsize=7)
        axes.set(ylabel="steps dropped", xlim=(-0.6, len(sites) - 0.4))
        titled(axes, run.label)
        axes.legend(fontsize=7)
    return figure, runs


def figure6(runs: Sequence[Recorded]) -> Drawn:
    """Draw CKA between the layers "a|b" of two models as a map, a panel for each run.

    `normkit study un.figure6` trains such runs and measures them.
    """
    from matplotlib.ticker import MaxNLocator

    runs = with_quantities(runs, "cka")
    figure = canvas.figure(3.6 * len(runs), 3.2)
    for place, run in enumerate(runs):
        cells = {site: series.values[-1] for site, series in run.sites("cka").items() if "|" in site}
        pairs = [site.split("|", 1) for site in cells]
        down, across = (list(dict.fromkeys(pair[i] for pair in pairs)) for i in (0, 1))
        grid = [[cells.get(f"{a}|{b}", float("nan")) for b in across] for a in down]
        axes = figure.add_subplot(1, len(runs), place + 1)
        edges = ([i + 0.5 for i in range(len(side) + 1)] for side in (across, down))
        image = axes.pcolormesh(*edges, grid, vmin=0, vmax=1, cmap="cividis", rasterized=True)
        axes.set(xlabel="layer of this model, by depth", ylabel="layer of the model with LN, by depth", aspect="equal")
        axes.grid(visible=False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        titled(axes, run.label)
        if place == len(runs) - 1:
            figure.colorbar(image, ax=axes, label="CKA")
    return figure, runs


def figure7(runs: Sequence[Recorded]) -> Drawn:
    """Draw PNAC by depth at the beginning and the end of training, a point a window."""
    run = with_quantities(runs, "pnac_activation", "pnac_gradient")[0]
    figure = canvas.figure(6.6, 3.0)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, low, high, title in ((panels[0], 0, BEGIN, "beginning"), (panels[1], END, 1, "end")):
        for number, kind in enumerate(("activation", "gradient")):
            sites = run.sites(f"pnac_{kind}")
            points = [
                (i + 1 + 0.3 * number - 0.15, value)
                for i, series in enumerate(sites.values())
                for step, value in series.points()
                if low * run.steps <= step <= high * run.steps
            ]
            if points:
                axes.scatter(
                    *zip(*points, strict=True), s=12, marker="os"[number], color=canvas.COLOURS[number], label=kind
                )
        axes.set_title(f"{title} of training", fontsize=9)
        axes.set(xlabel="norm, by depth", ylim=(-2, 102))
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("PNAC (%)")
    panels[0].legend(fontsize=8)
    figure.suptitle(safe(run.label), fontsize=9)
    return figure, [run]


def _mean_over_sites(run: Recorded, quantity: str) -> dict[int, float]:
    by_step: dict[int, list[float]] = {}
    for series in run.sites(quantity).values():
        for step, value in series.points():
            by_step.setdefault(step, []).append(value)
    return {step: sum(found) / len(found) for step, found in sorted(by_step.items())}


def _at(series: Series, step: float) -> float:
    """The last value up to a step."""
    return next((value for at, value in reversed(series.points()) if at <= step), 0.0)
