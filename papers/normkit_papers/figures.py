"""The table of the papers' figures, drawn from result files and rows of any runs."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from normkit._util import pick
from normkit_papers.powernorm import figures as figures_power
from normkit_papers.report import canvas
from normkit_papers.report.length import draw_length
from normkit_papers.report.recorded import Drawn, Recorded, recorded
from normkit_papers.report.settings import Results
from normkit_papers.tears import figures as figures_tears
from normkit_papers.unified import figures as figures_unified


class Drawing(NamedTuple):
    """A figure: the function that draws it, the quantities it needs, and its content."""

    draw: Callable[[Sequence[Recorded]], Drawn]
    needs: str
    about: str


FIGURES: dict[str, Drawing] = {
    "pn.figure2": Drawing(
        figures_power.figure2, "distance_mean distance_var",
        "Distance of batch mean and variance from the running ones in the first BatchNorm"),
    "pn.figure3": Drawing(
        figures_power.figure3, "g_mu g_sigma2",
        "Gradient through mean and variance in the first BatchNorm"),
    "pn.figure4": Drawing(
        figures_power.figure4, "distance_var distance_quadratic g_sigma2 g_psi2",
        "Variance of BatchNorm against quadratic mean of PN-V: their distances and their gradients"),
    "pn.figure5": Drawing(
        figures_power.figure5, "a score",
        "Score by batch size"),
    "pn.figure6": Drawing(
        figures_power.figure6, "singular_value[i]",
        "Singular values of the embedding after training, the largest being 1"),
    "pn.figure7": Drawing(
        figures_power.figure7,
        "gamma_over_psi_min gamma_over_psi_q25 gamma_over_psi_median gamma_over_psi_q75 gamma_over_psi_max",
        "Spread over channels of gamma over psi_B by layer, at the end of training: Lemma 2 holds up to 1"),
    "tears.figure1": Drawing(
        figures_tears.figure1, "a score",
        "Score on the validation split while training"),
    "tears.figure2": Drawing(
        figures_tears.figure2, "gradient_norm",
        "Norm of the whole gradient while training"),
    "tears.figure3": Drawing(
        figures_tears.figure3, "learned_g",
        "The learned g by depth, at the end of training, for each kind of sublayer"),
    "tears.figure4": Drawing(
        figures_tears.figure4, "learned_g",
        "The same with and without label smoothing"),
    "un.figure1": Drawing(
        figures_unified.figure1, "a score",
        "Score on the validation split by norm, a panel a task; solid where all norms fold away"),
    "un.figure3": Drawing(
        figures_unified.figure3, "pnac_activation pnac_gradient",
        "Percent of channels whose statistics look normal over iterations, averaged over layers"),
    "un.figure4": Drawing(
        figures_unified.figure4,
        "channel_activation channel_activation_am channel_activation_gm channel_gradient channel_gradient_am",
        "Statistics of one channel in three layers, with their geometric and arithmetic means over a window"),
    "un.figure5": Drawing(
        figures_unified.figure5, "filtered",
        "Steps that outlier filtration has dropped, by layer, at a third, two thirds and the end of training"),
    "un.figure6": Drawing(
        figures_unified.figure6, "cka",
        "Similarity (CKA) between the layers of two models"),
    "un.figure7": Drawing(
        figures_unified.figure7, "pnac_activation pnac_gradient",
        "PNAC in each layer, at the beginning and at the end of training"),
    "length": Drawing(
        draw_length, "drift_mean length",
        "Distance of batch means from the running ones in the first norm by batch length, coloured by target length"),
}  # fmt: skip


def draw(name: str, results: Results, path: str | Path) -> tuple[Path, list[str]]:
    """Draw a figure from the runs that recorded its quantities.

    Args:
        name: Name of the figure, such as "pn.figure2".
        results: Results by folder.
        path: File to write, .png or .svg.

    Returns:
        The file, and the labels of runs that the figure does not show: they lack a quantity or a norm of its kind,
        are of another data set, or are more runs than it takes.

    Raises:
        ValueError: for an unknown figure, or if no run recorded what it needs; the message states how to record it.
    """
    path = canvas.figure_path(path)
    drawing = pick(FIGURES, name, "figure")
    with canvas.style():
        try:
            runs = recorded(results)
            figure, used = drawing.draw(runs)
            shown = [id(run.result) for run in used]
            return canvas.save(figure, path), [run.label for run in runs if id(run.result) not in shown]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None


def listing() -> str:
    """List all figures with their content and the quantities they need."""
    return "\n".join(f"  {name:<14} {row.about}\n{'':17}needs {row.needs}" for name, row in FIGURES.items())
