"""Turn LayerNorm into RMSNorm: its centring moves into the layers that write its input."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normkit.transforms.convert import find, replacement
from normkit.transforms.fastpath import leave_fast_path
from normkit.transforms.fold.fold import TOLERANCE
from normkit.transforms.fold.position import position
from normkit.transforms.fold.relations import Blocked, listed, unused_weights
from normkit.transforms.fold.report import Outcome, Report
from normkit.transforms.fold.rewrite import Edit
from normkit.transforms.fold.survey import Survey
from normkit.transforms.fold.trace import ZERO, Product, Source, Trace
from normkit.transforms.fold.verify import error
from normkit.transforms.model_changes import record_changes


def to_rms(
    model: nn.Module, *example: Any, outputs: Callable[[Any], Any] | None = None, untie: bool = False, **kwexample: Any
) -> tuple[nn.Module, Report]:
    """Return an equivalent model with RMSNorms in place of LayerNorms, and a report on each.

    A LayerNorm subtracts the mean of its input, so the layers that write a residual stream which only LayerNorms read
    need not write a mean: `W - mean over outputs of W`, `b - mean(b)`, likewise embeddings and positions. The rest of
    the LayerNorm is `weight * x / sqrt(mean(x^2) + eps) + bias`, an RMSNorm with its bias. Post-norm models cannot do
    this: there a norm's output, which has a mean, is part of the next norm's input.

    The connections are traced as in `audit`, and the result is verified as in `fold`.

    Args:
        model: The model, in evaluation mode.
        *example: The arguments of a call of the model.
        outputs: Picks what you use of the model's output, such as `lambda out: out.logits`.
        untie: Give an output layer that is tied to an embedding a copy of its own first.
        **kwexample: The keyword arguments of the call.

    Returns:
        The model with RMSNorms, and the outcome of each norm.

    Raises:
        ValueError: If the model has no LayerNorm, is in training mode, or the example does not fit.
        RuntimeError: If the result differs in float64.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval()
        >>> to_rms(model, torch.randn(3, 4))[0][1]
        RMSNorm(4, rms(bias=True))
    """
    survey = Survey(model, example, kwexample, outputs, untie, True, "to_rms")
    outcomes, writers = _decide(survey)
    if not any(_centres(outcome.norm) for outcome in outcomes.values()):
        kinds = ", ".join(sorted({outcome.norm for outcome in outcomes.values()}))
        raise ValueError(f"to_rms() found no LayerNorm; the norms are {kinds}")
    worst = survey.verifier.worst(_rewrite(survey.model, survey.trace, outcomes, writers))
    if not worst <= TOLERANCE:
        raise RuntimeError(f"to_rms() cannot verify this model: outputs differ by {worst:.1e} in float64")
    done = _rewrite(survey.copy(), survey.trace, outcomes, writers)
    with torch.no_grad():
        native = error(done(*example, **kwexample), model(*example, **kwexample), outputs)
    record_changes(done)
    return done, Report(tuple(outcomes.values()), tuple(survey.calls), worst, native)


def _centres(kind: str) -> bool:
    return kind.partition("(")[0] == "layer"


def _decide(survey: Survey) -> tuple[dict[str, Outcome], list[Product]]:
    """The outcome of each norm, and the layers that have to write no mean."""
    kinds = {name: found.kind for name, found in find(survey.model).items()}
    outcomes: dict[str, Outcome] = {}
    writers: list[Product] = []
    for name, kind in kinds.items():
        outcome = Outcome(name, kind, position(survey.trace, name), "kept", why="it does not centre")
        if _centres(kind):
            try:
                stream = _Stream(survey.trace, survey.model, kinds)
                stream.follow(name)
                writers += stream.writers
                into = tuple(dict.fromkeys(w.view.parameter.removesuffix(".weight") for w in stream.writers))
                outcome = replace(outcome, action="rms", into=into, why="")
            except Blocked as blocked:
                outcome = replace(outcome, why=str(blocked))
        outcomes[name] = outcome
    return outcomes, list(dict.fromkeys(writers))


class _Stream:
    """All that is added up to the input of a norm, and everything that reads any of it."""

    def __init__(self, trace: Trace, model: nn.Module, kinds: dict[str, str]):
        self.trace, self.kinds = trace, kinds
        self.unused = unused_weights(trace, model)
        self.writers: list[Product] = []
        self.seen: set[int] = set()

    def follow(self, name: str) -> None:
        """Walk the stream of a norm.

        Raises:
            Blocked: If something other than a LayerNorm reads the mean, or a layer cannot write without one.
        """
        pairs = self.trace.inputs.get(name)
        if pairs is None:
            raise Blocked("it never ran")
        if bool((pairs[:, 0] <= ZERO).any()):
            raise Blocked("its input is not written by layers alone")
        width = int(pairs[:, 1].max()) + 1
        if width in self.unused:
            raise Blocked(self.unused[width])
        self._visit(pairs, width)

    def _visit(self, pairs: Tensor, width: int) -> None:
        for source, codes in self.trace.by_code(pairs[:, 0]):
            own = pairs[torch.isin(pairs[:, 0], codes)]
            index = (own[:, 0] - source.base).long()
            if not torch.equal(index % width, own[:, 1].long()) or source.size % width:
                raise Blocked(f"{source.name} writes its channels in another order")
            if source.base in self.seen:
                continue
            self.seen.add(source.base)
            self._readers(source, width)
            if source.product is not None:
                self._writer(source, width)
            elif source.kind == "norm":
                raise Blocked(f"the output of norm {source.name}, which has a mean, is part of its input")
            elif source.kind == "input":
                raise Blocked("the caller writes its input")
            for term in source.terms:
                if source.gains is not None:
                    raise Blocked(f"its input is multiplied by a parameter in {source.name}")
                if term is None or bool((term[0][:, 0] <= ZERO).any()):
                    raise Blocked(f"something that is no layer's output is added to its input in {source.name}")
                self._visit(term[0], width)

    def _readers(self, source: Source, width: int) -> None:
        for by in source.reads:
            if isinstance(by, Source):
                if by.size != width:
                    raise Blocked(f"its stream is read by {by.name}")
                whole = torch.arange(width, dtype=torch.float64)
                self._visit(torch.stack([by.base + whole, whole], 1), width)
            elif isinstance(by, str) and by.startswith("norm "):
                reader = by.removeprefix("norm ")
                if not _centres(self.kinds.get(reader, "")):
                    raise Blocked(f"its stream is also read by norm {reader}, which does not centre")
            else:
                raise Blocked(f"its stream is also read by {by if isinstance(by, str) else by.view.parameter}")

    def _writer(self, source: Source, width: int) -> None:
        product = source.product
        assert product is not None
        name, place = product.view.parameter, self.trace.biases.get(product)
        if name in self.trace.entangled:
            raise Blocked(f"{name} shares memory with {self.trace.entangled[name]}")
        for parameter in [name] if place is None else [name, place.parameter]:
            if readers := self.trace.weight_readers.get(parameter):
                raise Blocked(f"{parameter} is also read by {listed(sorted(readers))}")
        uses = [s.product for s in self.trace.sources.values() if s.product and s.product.view.parameter == name]
        if len(uses) > 1:
            tied = any(use.kind == "embedding" for use in uses)
            advice = "tied to an embedding; untie=True gives the output layer a copy of its own"
            raise Blocked(f"{name} is {advice if tied else 'used in several places'}")
        if place is not None and sum(other.parameter == place.parameter for other in self.trace.biases.values()) > 1:
            raise Blocked(f"{place.parameter} is also the bias of another product")
        if product.kind != "table" and (product.view.size[0] != 1 or product.view.outputs != width):
            raise Blocked(f"{name} writes only a part of the channels")
        self.writers.append(product)


@torch.no_grad()
def _rewrite(model: nn.Module, trace: Trace, outcomes: dict[str, Outcome], writers: list[Product]) -> nn.Module:
    widths = {name: int(pairs[:, 1].max()) + 1 for name, pairs in trace.inputs.items()}
    changed = {name: outcome for name, outcome in outcomes.items() if outcome.action == "rms"}
    width_of = {writer: widths[name] for name, outcome in changed.items() for writer in writers
                if writer.view.parameter.removesuffix(".weight") in outcome.into}  # fmt: skip
    edit = Edit(model)
    for writer in writers:
        view, width = writer.view, width_of[writer]
        of = (lambda w, width=width: w.view(-1, width)) if writer.kind == "table" else view.of
        edit.change(view.parameter, lambda w, of=of: of(w).sub_(of(w).mean(-1, keepdim=True)))
        if place := trace.biases.get(writer):
            edit.change(place.parameter, lambda b, place=place: place.of(b).sub_(place.of(b).mean()))
    edit.write()
    for name in changed:
        old = model.get_submodule(name)
        new = replacement(old, "rms", next(model.parameters(), None))
        if not name:
            return new
        model.set_submodule(name, new)
    leave_fast_path(model)
    return model
