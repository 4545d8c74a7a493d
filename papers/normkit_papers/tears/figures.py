"""Figures of Transformers without Tears (Nguyen and Salazar, IWSLT 2019)."""

from collections.abc import Sequence

from normkit_papers.report import canvas
from normkit_papers.report.canvas import safe
from normkit_papers.report.curves import extremes
from normkit_papers.report.recorded import POINTS, Drawn, Recorded, titled, with_quantities

SUBLAYERS = {  # names of norms in our models: the paper's names of sublayers
    "encoder": {"attention_norm": "encoder attention", "feedforward_norm": "encoder feed-forward"},
    "decoder": {
        "self_norm": "decoder self-attention",
        "attention_norm": "decoder self-attention",
        "cross_norm": "decoder-encoder attention",
        "feedforward_norm": "decoder feed-forward",
    },
}
SMOOTHING = "label_smoothing"
VALIDATED = (("bleu", "BLEU on the validation split"), ("loss", "Loss on the validation split"))


def figure1(runs: Sequence[Recorded]) -> Drawn:
    """Draw BLEU, or else the loss, on the validation split over training."""
    key, title = validated_by(runs)
    found = [(run, [(point["step"], point[key]) for point in run.result["valid"] if key in point]) for run in runs]
    figure = canvas.figure(4.8, 3.2)
    axes = figure.add_subplot()
    for number, (run, points) in enumerate(found):
        if points:
            axes.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=2.5,
                label=safe(run.label),
                **canvas.line_style(number),
            )
    axes.set(xlabel="step", ylabel=title)
    axes.legend(fontsize=8)
    return figure, [run for run, points in found if points]


def figure2(runs: Sequence[Recorded]) -> Drawn:
    """Draw the norm of the whole gradient before clipping, a panel for each run, on one scale."""
    runs = with_quantities(runs, "gradient_norm")
    across = min(2, len(runs))
    down = -(-len(runs) // across)
    figure = canvas.figure(3.4 * across, 2.1 * down + 0.3)
    panels = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    for number, (axes, run) in enumerate(zip(panels, runs, strict=False)):
        known = run.recording.of("gradient_norm")[""].points()
        line = extremes([step for step, _ in known], [value for _, value in known], POINTS)
        axes.plot(*line, linewidth=0.7, **canvas.line_style(number))
        titled(axes, run.label)
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("gradient norm", fontsize=9)
    return figure, runs


def figure3(runs: Sequence[Recorded]) -> Drawn:
    """Draw the learned g by depth at the end of training, a panel for each kind of sublayer."""
    runs = with_quantities(runs, "learned_g")
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run in runs:
        for site, series in run.sites("learned_g").items():
            place = _place(site)
            if place is not None and (points := series.points()):
                lines.setdefault(place[0], {}).setdefault(run.label, []).append((place[1], points[-1][1]))
    if not lines:
        raise ValueError("none of the recorded norms is in a numbered layer of an encoder or a decoder")
    figure = canvas.figure(2.3 * len(lines) + 0.5, 2.9)
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    for axes, (kind, by_run) in zip(panels, lines.items(), strict=True):
        for number, run in enumerate(runs):
            if run.label in by_run:
                points = zip(*sorted(by_run[run.label]), strict=True)
                axes.plot(*points, marker="o", markersize=3, label=safe(run.label), **canvas.line_style(number))
        axes.set_title(kind, fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("g")
    figure.supxlabel("layer", fontsize=9)
    lines_of = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    named = {name: handle for pairs in lines_of for handle, name in pairs}  # a decoder alone is not in every panel
    figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=3, fontsize=8)
    return figure, [run for run in runs if any(run.label in by_run for by_run in lines.values())]


def figure4(runs: Sequence[Recorded]) -> Drawn:
    """Draw the learned g by depth with and without label smoothing; needs runs of both."""
    runs = with_quantities(runs, "learned_g")
    kinds = {bool(run.settings.get(SMOOTHING)) for run in runs}
    if len(kinds) < 2:
        raise ValueError("this compares runs with and without label smoothing; train one with --label-smoothing 0")
    return figure3([run if SMOOTHING in run.label else run._replace(label=_smoothed(run)) for run in runs])


def _smoothed(run: Recorded) -> str:
    return f"{run.label}, {SMOOTHING}={run.settings.get(SMOOTHING, 0)}"


def validated_by(runs: Sequence[Recorded]) -> tuple[str, str]:
    """The score that validated these runs, at least twice, and its title; else ValueError."""
    for key, title in VALIDATED:
        if any(sum(key in point for point in run.result["valid"]) > 1 for run in runs):
            return key, title
    raise ValueError("none of these runs was validated twice; train with --valid-every")


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
