"""Report for each norm what folding can make of it, without a change to the model."""

from typing import Any

from torch import nn

from normkit.fold.plan import FoldPlan
from normkit.fold.report import Audit
from normkit.fold.survey import Survey
from normkit.models.invoke import Call, Pick


def audit(
    model: nn.Module,
    *example: Any,
    outputs: Pick | None = None,
    untie: bool = False,
    other_shapes: bool = True,
    keep_architecture: bool | None = None,
    **kwexample: Any,
) -> Audit:
    """Report for each norm what `fold` can make of it, without changing anything.

    The model runs on the example, and on random inputs of other shapes made after it. Every channel is followed from
    where it is written to everything that reads it.

    Args:
        model: The model, in evaluation mode.
        *example: The arguments of a call of the model, or one batch of a loader that is a mapping of keywords.
        outputs: Picks what you use of the model's output, such as `lambda out: out.logits`, as in `fold`.
        untie: Give an output layer that is tied to an embedding a copy of its own first.
        other_shapes: Also try other lengths and sizes, not only another batch.
        keep_architecture: Report what `fold` with this argument can make of it.
        **kwexample: The keyword arguments of the call.

    Returns:
        A row for each norm. The errors are those of `fold`.

    Examples:
        >>> import normkit, torch
        >>> model = nn.Sequential(normkit.make("un", 4), nn.Linear(4, 2)).eval()
        >>> audit(model, torch.zeros(3, 4)).foldable
        '1 of 1'
    """
    survey = Survey(model, Call(example, kwexample), outputs, untie, other_shapes, "audit", keep=keep_architecture)
    return survey.audit(FoldPlan(survey.trace, survey.model).outcomes)
