"""Figures of Transformers without Tears (Nguyen and Salazar, IWSLT 2019)."""

from collections.abc import Sequence

from normkit_papers.report.recorded import Drawn, Recorded, add_line, panels, with_quantities

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
VALIDATED = {"bleu": "BLEU on the validation split", "loss": "loss on the validation split"}


def figure1(runs: Sequence[Recorded]) -> Drawn:
    """Draw BLEU, or else the loss, on the validation split over training."""
    key, title = validated_by(runs)
    figure, used = panels(1, 1), list[Recorded]()
    for run in runs:
        if points := validation(run, key):
            add_line(figure, points, run.label, len(used), mode="lines+markers")
            used.append(run)
    figure.update_xaxes(title="step")
    figure.update_yaxes(title=title)
    return figure, used


def figure2(runs: Sequence[Recorded]) -> Drawn:
    """Draw the norm of the whole gradient before clipping, a panel for each run, on one scale."""
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


def figure3(runs: Sequence[Recorded]) -> Drawn:
    """Draw the learned g by depth at the end of training, a panel for each kind of sublayer."""
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


def figure4(runs: Sequence[Recorded]) -> Drawn:
    """Draw the learned g by depth with and without label smoothing; needs runs of both."""
    runs = with_quantities(runs, "learned_g")
    if len({bool(run.settings.get(SMOOTHING)) for run in runs}) < 2:
        raise ValueError("this compares runs with and without label smoothing; train one with --label-smoothing 0")
    named = [f"{run.label}, {SMOOTHING}={run.settings.get(SMOOTHING, 0)}" for run in runs]
    return figure3([
        run if SMOOTHING in run.label else run._replace(label=name) for run, name in zip(runs, named, strict=True)
    ])  # fmt: skip


def validation(run: Recorded, key: str) -> list[tuple[float, float]]:
    """Steps and scores of the validation passes."""
    return [(point["step"], point[key]) for point in run.result["valid"] if key in point]


def validated_by(runs: Sequence[Recorded]) -> tuple[str, str]:
    """The score that validated these runs, at least twice, and its title; else ValueError."""
    for key, title in VALIDATED.items():
        if any(len(validation(run, key)) > 1 for run in runs):
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
