"""Fold the norms of a saved run away; the result is a run folder like any other."""

import copy
import dataclasses

import torch
from torch import nn

from normkit.lab.tasks import TASKS
from normkit.lab.train.config import Run
from normkit.lab.train.run import Loaded
from normkit.norms import NoNorm, parse
from normkit.text import format_spec
from normkit.transforms import Audit, Outcome, Report, audit, fold


def audit_run(loaded: Loaded) -> Audit:
    """Per norm of a run's model: what folding can make of it, with the output layer untied from the embedding."""
    run, model, vocabularies = loaded
    spec = TASKS[run.task]
    found = audit(model.get_submodule(spec.part), *spec.load("example")(run.model, vocabularies), untie=True)
    return dataclasses.replace(found, rows=_named(found.rows, spec.part))


def fold_run(loaded: Loaded) -> tuple[Loaded, Report]:
    """A run's model with its norms folded away, and what became of each; the output layer gets its own matrix.

    The run that is returned describes the model that is left, in which `nonorm` stands where a norm was.
    """
    run, model, vocabularies = loaded
    spec = TASKS[run.task]
    part, report = fold(model.get_submodule(spec.part), *spec.load("example")(run.model, vocabularies), untie=True)
    for fate in report:
        if fate.action in ("multiply-add", "add"):
            part.set_submodule(fate.name, _as_norm(part.get_submodule(fate.name)))
    report = dataclasses.replace(report, rows=_named(report.rows, spec.part))
    folded = part
    if spec.part:
        folded = copy.deepcopy(model)
        folded.set_submodule(spec.part, part)
    return Loaded(_described(run, report.rows), folded, vocabularies), report


def _named(rows: tuple[Outcome, ...], part: str) -> tuple[Outcome, ...]:
    """The rows with names in the whole model, not in the part of it that has the norms."""
    return tuple(dataclasses.replace(row, name=f"{part}.{row.name}") for row in rows) if part else rows


def _as_norm(affine: nn.Module) -> NoNorm:
    dim = max(tensor.numel() for tensor in (affine.weight, affine.bias) if isinstance(tensor, torch.Tensor))
    norm = NoNorm(dim, affine=True).eval()
    with torch.no_grad():
        for mine, left in ((norm.weight, affine.weight), (norm.bias, affine.bias)):
            if mine is not None and isinstance(left, torch.Tensor):
                mine.copy_(left)
    return norm


def _described(run: Run, fates: tuple[Outcome, ...]) -> Run:
    """The run with a model whose norms are what folding left of them."""
    left = {fate.name: _left(fate) for fate in fates}
    kinds = list(left.values())
    common = max(set(kinds), key=kinds.count)
    others = {name: spec for name, spec in left.items() if spec != common}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, norm=common, norm_at=others, tie=False))


def _left(fate: Outcome) -> str:
    """The spec of what is left of a norm."""
    if fate.action in ("folded", "folded back"):
        return "nonorm"
    if fate.action in ("multiply-add", "add"):
        return "nonorm(affine=True)"
    if fate.action == "gain folded":
        name, given = parse(fate.norm)
        return format_spec(name, {**given, "affine": False})
    return fate.norm
