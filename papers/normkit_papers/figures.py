"""The table of the papers' figures, drawn from result files and rows of any runs."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from normkit._util import pick
from normkit_papers.powernorm import figures as power
from normkit_papers.report.recorded import Drawn, Recorded, recorded
from normkit_papers.report.settings import Results
from normkit_papers.tears import figures as tears
from normkit_papers.unified import figures as unified

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


class Drawing(NamedTuple):
    """A figure: the function that draws it, its content, and the quantities that it needs."""

    draw: Callable[[Sequence[Recorded]], Drawn]
    about: str
    needs: str


_VALID, _PNAC = "two validations (--valid-every)", "pnac_activation pnac_gradient (--quantities all)"
FIGURES: dict[str, Drawing] = {
    "pn.figure2": Drawing(power.figure2, "distance of batch and running statistics, first BatchNorm",
                          "distance_mean distance_var"),
    "pn.figure3": Drawing(power.figure3, "gradient through mean and variance, first BatchNorm", "g_mu g_sigma2"),
    "pn.figure4": Drawing(power.figure4, "variance of BatchNorm against quadratic mean of PN-V",
                          "distance_var distance_quadratic g_sigma2 g_psi2"),
    "pn.figure5": Drawing(power.figure5, "score by batch size", "scores of two sizes of batch (--batch-tokens)"),
    "pn.figure6": Drawing(power.figure6, "singular values of the embedding after training", "singular_value[i]"),
    "pn.figure7": Drawing(power.figure7, "spread of gamma over psi_B by layer at the end of training; Lemma 2 holds up "
                          "to 1", " ".join(power.QUARTILES)),
    "tears.figure1": Drawing(tears.figure1, "score on the validation split while training", _VALID),
    "tears.figure2": Drawing(tears.figure2, "norm of the whole gradient while training", "gradient_norm"),
    "tears.figure3": Drawing(tears.figure3, "learned g by depth and kind of sublayer", "learned_g"),
    "tears.figure4": Drawing(tears.figure4, "learned g with and without label smoothing", "learned_g"),
    "un.figure1": Drawing(unified.figure1, "score on the validation split by norm, a panel a task", _VALID),
    "un.figure3": Drawing(unified.figure3, "channels whose statistics look normal, averaged over layers", _PNAC),
    "un.figure4": Drawing(unified.figure4, "statistics of one channel in three layers, and their means over a window",
                          "channel_activation and channel_gradient with _am and _gm"),
    "un.figure5": Drawing(unified.figure5, "steps that outlier filtration has dropped, by layer", "filtered"),
    "un.figure6": Drawing(unified.figure6, "similarity (CKA) of the layers of two models", "cka"),
    "un.figure7": Drawing(unified.figure7, "channels that look normal, by layer and part of training", _PNAC),
}  # fmt: skip


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
        figure, used = drawing.draw(runs)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    shown = {id(run.result) for run in used}
    return figure, [run.label for run in runs if id(run.result) not in shown]
