"""Norms gone, outputs the same: absorb every norm that allows it, and prove it."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normkit.transforms.audit import Audit, Survey
from normkit.transforms.fold.plan import Outcome, Plan
from normkit.transforms.fold.rewrite import absorb
from normkit.transforms.fold.verify import error
from normkit.transforms.model_changes import record_changes

TOLERANCE = 1e-9  # of a proof in float64, relative to the largest output


@dataclass(frozen=True)
class Report(Audit):
    """What `fold` did: a row a norm, the largest error in float64, and that of the model as it is returned."""

    rows: tuple[Outcome, ...]
    tried: tuple[str, ...]
    max_error: float = 0.0
    native_error: float = 0.0

    def __str__(self) -> str:
        return (
            f"{super().__str__()}\nlargest error {self.max_error:.1e} in float64, relative to the largest output, on "
            f"{', '.join(self.tried)}; {self.native_error:.1e} as it is"
        )


def fold(
    model: nn.Module,
    *example: Any,
    outputs: Callable[[Any], Any] | None = None,
    untie: bool = False,
    other_shapes: bool = True,
    **kwexample: Any,
) -> tuple[nn.Module, Report]:
    """Return an equivalent model for inference without its norms, and a report that says what became of each.

    At inference a norm is `rest(x) * scale + shift`. Where `rest` is the identity (offline norms) the norm vanishes:

    - into the layers that read it, if nobody else does: `b += W shift; W *= scale`, for every product with a weight
      that the model computes: Linear, Conv1D, convolutions without padding, raw in-projections, several at once;
    - else back into the layers that write its input: `W = scale W; b = scale b + shift`, also through embeddings,
      tables of positions, and sums of these;
    - else it becomes one multiply-add, or one addition where zero padding stands between it and its reader.

    Of other norms the gain and bias vanish where they can. What is kept is kept with the reason. Who reads what is not
    assumed but seen, see `audit`, and the result is compared with the original in float64 on the example and on random
    inputs of other shapes; with `other_shapes=False` only the batch varies, for a model that will never see another
    length or size (Swin at a multiple of its window, where nothing is padded). Numbers and flags are taken as fixed; a
    norm that a weight might read which no call used (an expert, another head) stays. A tied output layer stays tied
    unless `untie=True` gives it a copy of the embedding.

    The original is not changed. ValueError for a model in training mode, an example that does not fit, a forward that
    is random; TypeError for wrapped or quantized models; RuntimeError where folded weights overflow in half precision.

    >>> import normkit
    >>> model = nn.Sequential(normkit.make("un", 4), nn.Linear(4, 2)).eval()
    >>> folded, report = fold(model, torch.randn(3, 4))
    >>> folded
    Sequential(
      (0): Identity()
      (1): Linear(in_features=4, out_features=2, bias=True)
    )
    """
    survey = Survey(model, example, kwexample, outputs, untie, other_shapes, "fold")
    plan = survey.plan()
    worst = survey.verifier.worst(absorb(survey.model, survey.trace, plan))
    if not worst <= TOLERANCE:
        plan, worst = _each_alone(survey, plan)
    del survey.model
    folded = absorb(survey.copy(), survey.trace, plan)
    with torch.no_grad():
        native = error(folded(*example, **kwexample), model(*example, **kwexample), outputs)
    if not native < float("inf"):
        raise RuntimeError(
            f"fold() proved this in float64 (error {worst:.1e}), but with the model's own numbers the folded one puts "
            "out others that are not finite: a folded weight exceeds what its type holds. "
            "Fold it in float32: model.float()"
        )
    record_changes(folded)
    return folded, Report(tuple(plan.fates.values()), tuple(survey.calls), worst, native)


def _each_alone(survey: Survey, plan: Plan) -> tuple[Plan, float]:
    """Should not be needed: leave out the norms whose folding, tried alone, is not exact."""
    refused: dict[str, str] = {}
    survey.model = survey.double()
    for name in [name for name, fate in plan.fates.items() if fate.action != "kept"]:
        alone = survey.plan({other: "" for other in plan.fates if other != name})
        worst = survey.verifier.worst(absorb(copy.deepcopy(survey.model), survey.trace, alone))
        if not worst <= TOLERANCE:
            refused[name] = f"not exact: folded alone, the output differs by {worst:.1e}"
    plan = survey.plan(refused)
    worst = survey.verifier.worst(absorb(survey.model, survey.trace, plan))
    if not worst <= TOLERANCE:
        raise RuntimeError(f"fold() cannot prove this: each norm folds exactly, together they differ by {worst:.1e}")
    return plan, worst
