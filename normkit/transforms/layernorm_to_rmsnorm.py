"""LayerNorm to RMSNorm, exactly: its centring moves into the layers that write what it reads."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normkit.transforms.audit import Survey
from normkit.transforms.convert import find, replacement
from normkit.transforms.fastpath import leave_fast_path
from normkit.transforms.fold.fold import TOLERANCE, Report
from normkit.transforms.fold.plan import Blocked, FoldPlanner, Outcome
from normkit.transforms.fold.rewrite import Edit
from normkit.transforms.fold.trace import Product, Source, Trace
from normkit.transforms.fold.verify import error
from normkit.transforms.model_changes import record_changes


def to_rms(
    model: nn.Module, *example: Any, outputs: Callable[[Any], Any] | None = None, untie: bool = False, **kwexample: Any
) -> tuple[nn.Module, Report]:
    """Return an equivalent model in which LayerNorms are RMSNorms wherever that is exact, and what became of each.

    A LayerNorm subtracts the mean of its input, so nobody notices when the writers of a residual stream that only
    LayerNorms read write no mean: `W - mean over outputs of W`, `b - mean(b)`, likewise embeddings and positions.
    What is then left of the LayerNorm is `weight * x / sqrt(mean(x^2) + eps) + bias`, an RMSNorm with its bias.
    Post-norm models cannot do this: there a norm's output, which has a mean, is part of the next norm's input.

    Who writes and reads the stream is seen as in `audit`, and the result is proved as in `fold`, with the same errors.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).eval()
    >>> to_rms(model, torch.randn(3, 4))[0][1]
    RMSNorm(4, rms(bias=True))
    """
    survey = Survey(model, example, kwexample, outputs, untie, True, "to_rms")
    planner = FoldPlanner(survey.trace, survey.model)
    fates, writers = _decide(survey, planner)
    if not any(fate.norm == "layer" or fate.norm.startswith("layer(") for fate in fates.values()):
        raise ValueError(
            f"to_rms() found no LayerNorm; the norms are {', '.join(sorted({f.norm for f in fates.values()}))}"
        )
    worst = survey.verifier.worst(_carry_out(survey.model, survey.trace, fates, writers))
    if not worst <= TOLERANCE:
        raise RuntimeError(f"to_rms() cannot prove this model: outputs differ by {worst:.1e} in float64")
    done = _carry_out(survey.copy(), survey.trace, fates, writers)
    with torch.no_grad():
        native = error(done(*example, **kwexample), model(*example, **kwexample), outputs)
    record_changes(done)
    return done, Report(tuple(fates.values()), tuple(survey.calls), worst, native)


def _decide(survey: Survey, planner: FoldPlanner) -> tuple[dict[str, Outcome], list[Product]]:
    kinds = {name: found.kind for name, found in find(survey.model).items()}
    fates: dict[str, Outcome] = {}
    writers: list[Product] = []
    for name, kind in kinds.items():
        fate = Outcome(name, kind, planner.position(name), "kept")
        if kind != "layer" and not kind.startswith("layer("):
            fates[name] = Outcome(name, kind, fate.position, "kept", why="it does not centre")
            continue
        try:
            stream = _Stream(planner, kinds)
            stream.follow(name)
            writers += stream.writers
            into = planner.names(stream.writers)
            fates[name] = Outcome(name, kind, fate.position, "rms", into)
        except Blocked as blocked:
            fates[name] = Outcome(name, kind, fate.position, "kept", why=str(blocked))
    return fates, list(dict.fromkeys(writers))


class _Stream:
    """All that is added up to what a norm reads, and everybody who reads any of it."""

    def __init__(self, planner: FoldPlanner, kinds: dict[str, str]):
        self.planner, self.trace, self.kinds = planner, planner.trace, kinds
        self.writers: list[Product] = []
        self.seen: set[int] = set()

    def follow(self, name: str) -> None:
        """Walk the stream of a norm; Blocked where a mean would be noticed or cannot be taken out."""
        pairs = self.trace.inputs.get(name)
        if name not in self.trace.inputs:
            raise Blocked("it never ran")
        if pairs is None:
            raise Blocked("its input is not written by layers alone")
        width = int(pairs[:, 1].max()) + 1
        self.planner.require_used(width)
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
                if term is None:
                    raise Blocked(f"something that is no layer's output is added to its input in {source.name}")
                self._visit(term[0], width)

    def _readers(self, source: Source, width: int) -> None:
        for each in source.reads:
            if isinstance(each.by, Source):
                if each.by.size != width:
                    raise Blocked(f"its stream is read by {each.by.name}")
                whole = each.by.base + torch.arange(width, dtype=torch.float64)
                self._visit(torch.stack([whole, torch.arange(width, dtype=torch.float64)], 1), width)
            elif isinstance(each.by, str) and each.by.startswith("norm "):
                reader = each.by.removeprefix("norm ")
                if self.kinds.get(reader, "").partition("(")[0] != "layer":
                    raise Blocked(f"its stream is also read by norm {reader}, which does not centre")
            else:
                by = each.by if isinstance(each.by, str) else each.by.view.parameter
                raise Blocked(f"its stream is also read by {by}")

    def _writer(self, source: Source, width: int) -> None:
        product = source.product
        assert product is not None
        self.planner.writes.require(product)
        if product.kind != "table" and (product.view.size[0] != 1 or product.view.outputs != width):
            raise Blocked(f"{product.view.parameter} writes only a part of the channels")
        self.planner.check_biases([product] if product in self.trace.biases else [])
        self.writers.append(product)


@torch.no_grad()
def _carry_out(model: nn.Module, trace: Trace, fates: dict[str, Outcome], writers: list[Product]) -> nn.Module:
    widths = {name: int(pairs[:, 1].max()) + 1 for name, pairs in trace.inputs.items() if pairs is not None}
    changed = {name: fate for name, fate in fates.items() if fate.action == "rms"}
    width_of = {writer: widths[name] for name, fate in changed.items() for writer in writers
                if writer.view.parameter.removesuffix(".weight") in fate.into}  # fmt: skip
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
