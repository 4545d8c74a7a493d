"""Turn LayerNorm into RMSNorm: its centring moves into the layers that write its input."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import unique
from normkit.fold.float64 import on_cpu
from normkit.fold.relations import Relations
from normkit.fold.report import Outcome, Report
from normkit.fold.rewrite import change
from normkit.fold.survey import TOLERANCE, Survey, take_all_apart
from normkit.fold.trace import ZERO, Product, Source, Trace
from normkit.models.convert import put_everywhere, replacement, take_place
from normkit.models.fastpath import leave_fast_path
from normkit.models.invoke import Call, Pick


@torch.inference_mode(False)  # the result may be trained
def to_rms(
    model: nn.Module, *example: Any, outputs: Pick | None = None, untie: bool = False, **kwexample: Any
) -> tuple[nn.Module, Report]:
    """Return an equivalent model with RMSNorms in place of LayerNorms, and a report on each.

    A LayerNorm subtracts the mean of its input. So the layers that write a residual stream which only LayerNorms read
    need not write a mean: `W - mean over outputs of W`, `b - mean(b)`, likewise embeddings and positions. The rest of
    the LayerNorm is `weight * x / sqrt(mean(x^2) + eps) + bias`, an RMSNorm with its bias. Post-norm models cannot do
    this: there a norm's output, which has a mean, is part of the next norm's input.

    The connections are traced as in `audit`, and the result is verified as in `fold`.

    Args:
        model: The model, in evaluation mode.
        *example: The arguments of a call of the model, or one batch of a loader that is a mapping of keywords.
        outputs: Picks what you use of the model's output, such as `lambda out: out.logits`.
        untie: Give an output layer that is tied to an embedding a copy of its own first.
        **kwexample: The keyword arguments of the call.

    Returns:
        The model with RMSNorms, and the outcome of each norm.

    Raises:
        ValueError: If the model has no LayerNorm, is in training mode, or the example does not fit.
        RuntimeError: If the result differs in float64, or changed weights overflow in half precision.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval()
        >>> to_rms(model, torch.randn(3, 4))[0][1]
        RMSNorm(4, rms(bias=True))
    """
    survey = Survey(model, Call(example, kwexample), outputs, untie, True, "to_rms")
    outcomes, producers = _decide(survey)
    if not any(_centres(outcome.norm) for outcome in outcomes.values()):
        kinds = ", ".join(sorted({outcome.norm for outcome in outcomes.values()}))
        raise ValueError(f"to_rms() found no LayerNorm; the norms are {kinds}")
    changed = [name for name, outcome in outcomes.items() if outcome.action == "rms"]
    survey.add_longer_call()
    worst = survey.worst(_rewrite(survey.model, survey.trace, changed, producers))
    if not worst <= TOLERANCE:
        survey.require_repeatable()
        raise RuntimeError(f"to_rms() cannot verify this model: outputs differ by {worst:.1e} in float64")
    done = _rewrite(take_all_apart(survey.copy()), survey.trace, changed, producers)
    return done, survey.report(done, outcomes, worst)


def _centres(kind: str) -> bool:
    return kind.partition("(")[0] == "layer"


@on_cpu()
def _decide(survey: Survey) -> tuple[dict[str, Outcome], dict[Product, int]]:
    """The outcome of each norm; the layers that have to write no mean, and their widths."""
    trace = survey.trace
    relations = Relations(trace, survey.model, {})
    outcomes: dict[str, Outcome] = {}
    producers: dict[Product, int] = {}
    for name, found in trace.norms.items():
        outcome = Outcome(name, found.kind, "kept", why="it does not centre")
        if _centres(found.kind):
            streams = relations.streams_of(trace.inputs.get(name, torch.zeros(0, 2))[:, 0])
            sources = [source for source in trace.sources.values() if relations.stream[source.base] in streams]
            why = _obstacle(relations, name, found.dim, streams, sources)
            own = [] if why else [source.product for source in sources if source.product]
            producers |= dict.fromkeys(own, found.dim)
            into = unique(product.layer for product in own)
            outcome = replace(outcome, action="kept" if why else "rms", into=into, why=why)
        outcomes[name] = outcome
    return outcomes, producers


def _obstacle(relations: Relations, name: str, width: int, streams: set[int], sources: list[Source]) -> str:
    """The reason why the streams that a norm reads keep their mean; "" if they may lose it."""
    trace = relations.trace
    if name not in trace.inputs:
        return "it never ran"
    for source in sources:
        if source.kind == "norm":
            return f"the output of norm {source.name}, which has a mean, is part of its input"
        if source.kind == "input":
            return "the model input is part of its input"
        for by in source.reads:
            norm = by.removeprefix("norm ") if isinstance(by, str) else ""
            if norm in trace.norms and not _centres(trace.norms[norm].kind):
                return f"its stream is also read by {by}, which does not centre"
            if isinstance(by, Product):
                return f"its stream is also read by {by.view.parameter}"
        product = source.product
        if product is not None and product.kind == "gain":
            return f"{product.layer} multiplies each channel by a number of its own"
        whole = product is None or product.kind == "table" or (product.view.size[0], product.view.outputs) == (1, width)
        if not whole or source.size % width:
            return f"{source.name} writes only a part of the channels"
    for link in relations.links:
        ends = relations.streams_of(torch.cat([link.a, link.b]))
        fixed = bool(ends - streams) or bool((link.b == 0).any())
        if ends & streams and fixed and link.why and not link.why.startswith("read by norm "):
            return f"its stream is also {link.why}" if link.why.startswith("read by ") else link.why
    for pairs in [trace.inputs[name], *(pairs for source in sources for pairs, _ in source.terms)]:
        if bool((pairs[:, 0] < ZERO).any()):
            return "its input is not written by layers alone"
        for source, codes in trace.by_code(pairs[:, 0]):
            own = pairs[torch.isin(pairs[:, 0], codes)]
            if not torch.equal((own[:, 0] - source.base).long() % width, own[:, 1].long()):
                return f"{source.name} writes its channels in another order"
    return ""


def _centred(weight: Tensor, rows: slice, of: Callable[[Tensor], Tensor]) -> Tensor:
    """A weight whose outputs have no mean; `of` is the part that writes, its outputs last."""
    of(weight := weight.clone(memory_format=torch.contiguous_format)).sub_(of(weight).mean(-1, keepdim=True))
    return weight


def _rows(table: Tensor, width: int) -> Tensor:
    return table.view(-1, width)


@torch.no_grad()
def _rewrite(model: nn.Module, trace: Trace, changed: list[str], producers: dict[Product, int]) -> nn.Module:
    for producer, width in producers.items():
        view = producer.view
        rowwise = producer.kind in ("table", "embedding")  # their rows are what they write
        change(
            model, view.parameter, partial(_centred, of=partial(_rows, width=width) if rowwise else view.of), rowwise
        )
        if bias := trace.biases.get(producer):
            change(model, bias.parameter, partial(_centred, of=bias.of), in_parts=False)
    for name in changed:
        old = model.get_submodule(name)
        take_place(new := replacement(old, "rms", next(model.parameters(), None)), old)
        model = put_everywhere(model, name, new)
    leave_fast_path(model)
    return model
