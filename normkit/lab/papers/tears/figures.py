"""Figures of Transformers without Tears (Nguyen and Salazar, IWSLT 2019)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from normkit.lab.report import canvas
from normkit.lab.report.curves import extremes
from normkit.lab.report.recorded import POINTS, Recorded, able, safe, titled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUBLAYERS = {  # our places: the paper's names of them
    "encoder": {"attention_norm": "encoder attention", "feedforward_norm": "encoder feed-forward"},
    "decoder": {
        "self_norm": "decoder self-attention",
        "attention_norm": "decoder self-attention",
        "cross_norm": "decoder-encoder attention",
        "feedforward_norm": "decoder feed-forward",
    },
}
SMOOTHING = "label_smoothing"
LOOKS = (("bleu", "BLEU on the validation split"), ("loss", "Loss on the validation split"))


def figure1(runs: Sequence[Recorded]) -> "Figure":
    """Score on the validation split over training, a line a run: BLEU where it was looked at, else the loss."""
    key, title = judged(runs)
    found = [(run, [(look["step"], look[key]) for look in run.result["valid"] if key in look]) for run in runs]
    figure = canvas.figure(4.8, 3.2)
    axes = figure.add_subplot()
    for number, (run, points) in enumerate(found):
        if points:
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=2.5, label=safe(run.label), **canvas.look(number)
            )
    axes.set(xlabel="step", ylabel=title)
    axes.legend(fontsize=8)
    return figure


def figure2(runs: Sequence[Recorded]) -> "Figure":
    """Norm of the whole gradient, before clipping, over training; a panel a run, on one scale."""
    runs = able(runs, "gradient_norm")
    across = min(2, len(runs))
    down = -(-len(runs) // across)
    figure = canvas.figure(3.4 * across, 2.1 * down + 0.3)
    panels = list(figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat)
    for number, (axes, run) in enumerate(zip(panels, runs, strict=False)):
        values = run.rows.of("gradient_norm")[""]
        known = [(step, value) for step, value in sorted(values.items()) if value is not None]
        points = extremes([step for step, _ in known], [value for _, value in known], POINTS)
        axes.plot(*points, linewidth=0.7, **canvas.look(number))
        titled(axes, run.label)
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("gradient norm", fontsize=9)
    return figure


def figure3(runs: Sequence[Recorded]) -> "Figure":
    """The learned g over depth at the end of training, a panel a kind of sublayer, a line a run."""
    runs = able(runs, "learned_g")
    lines: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for run in runs:
        for site, values in run.sites("learned_g").items():
            known = [values[step] for step in sorted(values) if values[step] is not None]
            place = _place(site)
            if place is not None and known:
                lines.setdefault(place[0], {}).setdefault(run.label, []).append((place[1], float(known[-1] or 0)))
    if not lines:
        raise ValueError("none of the recorded norms stands in a numbered layer of an encoder or a decoder")
    figure = canvas.figure(2.3 * len(lines) + 0.5, 2.9)
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    for axes, (kind, by_run) in zip(panels, lines.items(), strict=True):
        for number, run in enumerate(runs):
            if run.label in by_run:
                points = zip(*sorted(by_run[run.label]), strict=True)
                axes.plot(*points, marker="o", markersize=3, label=safe(run.label), **canvas.look(number))
        axes.set_title(kind, fontsize=9)
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("g")
    figure.supxlabel("layer", fontsize=9)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=3, fontsize=8)
    return figure


def figure4(runs: Sequence[Recorded]) -> "Figure":
    """The learned g over depth with and without label smoothing; runs of both must be there."""
    runs = able(runs, "learned_g")
    kinds = {bool(run.settings.get(SMOOTHING)) for run in runs}
    if len(kinds) < 2:
        raise ValueError("this compares runs with and without label smoothing; train one with --label-smoothing 0")
    return figure3([run if SMOOTHING in run.label else run._replace(label=_smoothed(run)) for run in runs])


def _smoothed(run: Recorded) -> str:
    return f"{run.label}, {SMOOTHING}={run.settings.get(SMOOTHING, 0)}"


def judged(runs: Sequence[Recorded]) -> tuple[str, str]:
    """What these runs were validated by, and its name; ValueError where none was, at least twice."""
    for key, title in LOOKS:
        if any(sum(key in look for look in run.result["valid"]) > 1 for run in runs):
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
