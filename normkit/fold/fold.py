"""Fold the norms of a model into the layers beside them, and verify the result."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normkit._util import require_flags
from normkit.fold.plan import FoldPlan
from normkit.fold.report import Audit, Report
from normkit.fold.rewrite import change, find_edits, largest_factor, rewrite
from normkit.fold.survey import TOLERANCE, Survey, take_all_apart
from normkit.models.checks import warn_untrained
from normkit.models.invoke import Call, Pick


@torch.inference_mode(False)  # the result may be trained
def fold(
    model: nn.Module,
    *example: Any,
    outputs: Pick | None = None,
    untie: bool = False,
    other_shapes: bool = True,
    multiply_adds: bool = False,
    keep_architecture: bool | None = None,
    **kwexample: Any,
) -> tuple[nn.Module, Report]:
    """Return an equivalent model for inference without its norms, and a report on each.

    At inference a norm is `rest(x) * scale + shift`. Where `rest` is the identity (norms with frozen statistics, called
    offline) the norm vanishes in a change of coordinates. The folded model computes `v` where the original computed
    `x = s * v + t`, with `s` and `t` for each channel such that the norm is the identity on `v`. Products with a weight
    take `s` and `t` of what they read and write, embeddings and tables those of what they write. A norm stays as one
    multiply-add (or one addition, where zero padding is in the way) if this contradicts something that fixes the
    coordinates at both of its ends: a nonlinear operation, the model's input or output, a tied weight. Of norms that
    compute statistics of each token the gain and bias vanish if they can. What stays has its reason in the report.

    The connections are not assumed but traced, see `audit`. The result is compared with the original in float64 on
    the example and on random inputs of other shapes. Numbers, flags and branches are taken as fixed, arguments that the
    example does not have as never given; the report names them, but for branches on lengths. A norm that a weight might
    read which no call used (another head) stays, and one of whose output the model selects rows that the example does
    not have. Experts that the example does not reach are reached by calls in which the tokens choose all in turn.
    Models that take `use_cache` are called with `use_cache=False`, unless the example says otherwise. Tied weights stay
    tied. The original is not changed.

    Args:
        model: The model, in evaluation mode.
        *example: The arguments of a call of the model, or one batch of a loader that is a mapping of keywords.
        outputs: Picks what you use of the model's output, such as `lambda out: out.logits`. What you use cannot change,
            so a norm whose output it is stays.
        untie: Give an output layer that is tied to an embedding a copy of its own. It lets the gain of a last norm
            vanish that computes statistics, or is negative. In the configuration of a Hugging Face model,
            `tie_word_embeddings` becomes False, unless the model ties other weights as well (T5, BART).
        other_shapes: Also verify with other lengths and sizes. False suits a model that will never see another length
            or size (Swin at a multiple of its window, where nothing is padded).
        multiply_adds: Leave each norm with frozen statistics as one multiply-add, for post-norm models in float16 and
            integers: the gains of their streams multiply up over the depth, and channels get very different ranges.
        keep_architecture: Change numbers alone: no parameter comes or goes. Gains of norms that compute statistics
            become 1 (0 where the class adds 1), and their biases 0 where the layers that read them have a bias. A bias
            without such a place stays in its norm. Norms with frozen statistics stay. The state of the result fits the
            class of the original model, so its own loaders open it. None means True for a model of Hugging Face all of
            whose norms compute statistics, and False for others.
        **kwexample: The keyword arguments of the call.

    Returns:
        The folded model, and the report: the outcome of each norm, and the errors of the comparison.

    Raises:
        ValueError: If the model is training, the example does not fit, or the forward is random.
        TypeError: If the model is wrapped or quantized.
        RuntimeError: If folded weights overflow in half precision.

    Examples:
        >>> import torch, normkit
        >>> model = nn.Sequential(normkit.make("un", 4), nn.Linear(4, 2)).eval()
        >>> folded, report = fold(model, torch.randn(3, 4))
        >>> folded
        Sequential(
          (0): Identity()
          (1): Linear(in_features=4, out_features=2, bias=True)
        )
    """
    require_flags(multiply_adds=multiply_adds)
    call = Call(example, kwexample)
    survey = Survey(model, call, outputs, untie, other_shapes, "fold", keep_architecture)
    warn_untrained(model, "fold")
    plan, worst = find_plan(survey, multiply_adds)
    folded = survey.copy()
    if survey.keep:
        for name, edit in find_edits(survey.model, plan).items():
            change(folded, survey.names.get(name, name), edit)
    else:
        folded = rewrite(take_all_apart(folded), plan)
    report = survey.report(folded, plan.outcomes, worst)
    return folded, replace(report, largest_factor=largest_factor(plan))


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


def find_plan(survey: Survey, multiply_adds: bool = False) -> tuple[FoldPlan, float]:
    """Find the coordinates that fold a model, and verify them in float64.

    Returns:
        The plan, and the largest error of the model that it gives.
    """
    plan = FoldPlan(survey.trace, survey.model, multiply_adds=multiply_adds)
    survey.add_longer_call()
    worst = survey.worst(rewrite(copy.deepcopy(survey.model), plan))
    if "no attribute 'weight'" in survey.failure:  # the model reads that of a norm that is gone
        survey.trace.keep_weights = True
        worst = survey.worst(rewrite(copy.deepcopy(survey.model), plan))
    if not worst <= TOLERANCE:
        survey.require_repeatable()
        plan, worst = _one_by_one(survey, plan)
    return plan, worst


def _one_by_one(survey: Survey, first: FoldPlan) -> tuple[FoldPlan, float]:
    """Should not be needed: leave out the norms whose folding is not exact."""
    reasons: dict[str, str] = {}
    exact: list[str] = []

    def tried(only: list[str]) -> tuple[FoldPlan, float]:
        plan = FoldPlan(survey.trace, survey.model, reasons, only, first.multiply_adds)
        return plan, survey.worst(rewrite(copy.deepcopy(survey.model), plan))

    for name in [name for name, outcome in first.outcomes.items() if outcome.action != "kept"]:
        worst = tried([*exact, name])[1]
        if worst <= TOLERANCE:
            exact.append(name)
        elif survey.failure:
            reasons[name] = f"the model fails without it: {survey.failure}"
        else:
            reasons[name] = f"not exact: with it folded, the output differs by {worst:.1e}"
    plan, worst = tried(exact)
    if not worst <= TOLERANCE:
        raise RuntimeError(f"fold() cannot verify this model: without any norm folded, outputs differ by {worst:.1e}")
    return plan, worst
