"""Fold the norms of a saved run."""

import copy
import dataclasses

import torch
from torch import nn

from normkit._util import format_spec
from normkit.fold import Audit, Outcome, Report, audit, fold
from normkit.norms import NoNorm, Norm, parse
from normkit_papers.tasks import TASKS
from normkit_papers.train.build import example_input
from normkit_papers.train.config import Run
from normkit_papers.train.folder import Loaded


def audit_run(loaded: Loaded) -> Audit:
    """Predict the outcome of folding for each norm of a run's model."""
    run, model, vocabularies = loaded
    spec = TASKS[run.task]
    found = audit(model.get_submodule(spec.part), *example_input(run, vocabularies))
    return dataclasses.replace(found, rows=_named(found.rows, spec.part))


def fold_run(loaded: Loaded) -> tuple[Loaded, Report]:
    """Fold the norms of a run's model; a tied output layer stays tied.

    Returns:
        The folded run, whose settings have `nonorm` in place of the folded norms and no FixNorm, which is part of the
        vectors then, and the outcome of each norm.
    """
    run, model, vocabularies = loaded
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    if all(isinstance(norm, NoNorm) and norm.weight is norm.bias is None for norm in norms):
        raise ValueError(f"{run.name} has no norms left to fold")
    spec = TASKS[run.task]
    part, report = fold(model.get_submodule(spec.part), *example_input(run, vocabularies))
    for outcome in report:
        if outcome.action in ("multiply-add", "add"):
            part.set_submodule(outcome.name, _as_norm(part.get_submodule(outcome.name)))
    report = dataclasses.replace(report, rows=_named(report.rows, spec.part))
    folded = part
    if spec.part:
        folded = copy.deepcopy(model)
        folded.set_submodule(spec.part, part)
    left = {outcome.name: _left(outcome) for outcome in report.rows}
    run = with_norms(run, left)
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, fixnorm=False))
    return Loaded(run, folded, vocabularies), report


def _named(rows: tuple[Outcome, ...], part: str) -> tuple[Outcome, ...]:
    """Rename rows from the part that contains the norms to the whole model."""
    return tuple(dataclasses.replace(row, name=f"{part}.{row.name}") for row in rows) if part else rows


def _as_norm(affine: nn.Module) -> NoNorm:
    dim = max(tensor.numel() for tensor in (affine.weight, affine.bias) if isinstance(tensor, torch.Tensor))
    norm = NoNorm(dim, affine=True).eval()
    with torch.no_grad():
        for mine, left in ((norm.weight, affine.weight), (norm.bias, affine.bias)):
            if mine is not None and isinstance(left, torch.Tensor):
                mine.copy_(left)
    return norm


def with_norms(run: Run, specs: dict[str, str]) -> Run:
    """Return the run with other norms, each given by its name in the model."""
    kinds = list(specs.values())
    common = max(kinds, key=kinds.count)  # of several, the first: the order of a set would be another in each process
    others = {name: spec for name, spec in specs.items() if spec != common}
    return dataclasses.replace(run, model=dataclasses.replace(run.model, norm=common, norm_at=others))


def _left(outcome: Outcome) -> str:
    """Return the spec of what is left of a norm."""
    if outcome.action in ("folded", "folded back"):
        return "nonorm"
    if outcome.action in ("multiply-add", "add"):
        return "nonorm(affine=True)"
    if outcome.action == "gain folded":
        name, given = parse(outcome.norm)
        return format_spec(name, {**given, "affine": False})
    return outcome.norm
