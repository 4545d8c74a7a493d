"""Find, without training, the norms that a model can lose within a budget."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.models import calibrate
from normkit.models.calibrate import evaluating
from normkit.models.checks import copy_model
from normkit.models.fit import Moments, solve
from normkit.models.invoke import Forward, call, seen
from normkit.models.take_apart import take_norms_apart
from normkit.norms import StatNorm
from normkit.removal.distill import mask_of
from normkit.removal.large_tokens import place_of

Score = Callable[[nn.Module], float]  # of a model; lower is better


class Cost(NamedTuple):
    """What a norm costs."""

    norm: str  # its name in the model
    block: str  # name of the block that holds it
    alone: float  # rise of the score if it alone has frozen statistics
    gone: bool  # it is among those that the budget allows


class Chosen(NamedTuple):
    """The norms that a budget allows."""

    model: nn.Module  # with frozen statistics in these norms
    costs: tuple[Cost, ...]  # of every norm, in the order in which they run
    forwards: int  # how often the batches of the fit or of the score went through a model


def block_of(name: str) -> str:
    """Return the block of a module: its name up to the first number, or the module itself.

    >>> block_of("model.layers.3.input_layernorm"), block_of("model.norm")
    ('model.layers.3', 'model.norm')
    """
    parts = name.split(".")
    return ".".join(parts[: next((i + 1 for i, part in enumerate(parts) if part.isdigit()), len(parts))])


@torch.no_grad()
def choose(
    original: nn.Module,
    converted: nn.Module,
    batches: Sequence[Any],
    score: Score,
    base: float,
    budget: float,
    *,
    forward: Forward | None = None,
    on_progress: Callable[[str, int, int], object] = lambda *_: None,
) -> Chosen:
    """Choose norms whose removal raises the score by no more than the budget.

    Each norm is fitted on what the original gives it, and its cost alone is measured. Blocks are then tried, the
    cheapest first: all norms of the block that alone keep to the budget, else the cheapest of them. What raises the
    joint score above the budget is put back. In the end `calibrate(like=original)` fits the chosen norms again, one on
    the other, which is kept if it lowers the score.

    Args:
        original: The model, in evaluation mode.
        converted: The model with offline norms.
        batches: To fit on.
        score: Returns a number for a model, such as its loss.
        base: The score of the original.
        budget: Largest rise of the score.
        forward: Called as `forward(model, batch)` in place of the model.
        on_progress: Called as `on_progress(stage, done, of)`.
    """
    names = [name for name, module in converted.named_modules() if isinstance(module, StatNorm)]
    if set(names) - {name for name, _ in original.named_modules()}:
        take_norms_apart(original := copy_model(original), names)  # modules of norm and activation
    order = _fit_alone(original, converted, names, batches, forward)
    tried = 0

    def rise(chosen: Iterable[str]) -> float:
        nonlocal tried
        tried += 1
        with evaluating(model := mixed(original, converted, chosen)):
            return score(model) - base

    alone: dict[str, float] = {}
    for name in order:
        alone[name] = rise([name])
        on_progress("measuring norm", len(alone), len(order))
    blocks: dict[str, list[str]] = {}
    for name in sorted(order, key=alone.__getitem__):
        if alone[name] <= budget:
            blocks.setdefault(block_of(place_of(converted, name)), []).append(name)
    gone: list[str] = []
    cheapest = sorted(blocks.values(), key=lambda block: sum(alone[name] for name in block))
    lowest = 0.0
    for number, block in enumerate(cheapest, 1):
        for more in (block, block[:1])[: len(block)]:
            if (found := rise([*gone, *more])) <= budget:
                gone, lowest = [*gone, *more], found
                break
        on_progress("adding block", number, len(cheapest))
    model = mixed(original, converted, gone)
    forwards = 2 + tried  # one to fit, one of the original
    if gone:
        fitted = calibrate(model, batches, like=original, forward=forward)
        with evaluating(fitted):
            if score(fitted) - base < lowest:
                model = fitted
        forwards += 4
    places = {name: place_of(converted, name) for name in order}
    costs = tuple(Cost(places[name], block_of(places[name]), alone[name], name in gone) for name in order)
    return Chosen(model.eval(), costs, forwards)


def mixed(original: nn.Module, converted: nn.Module, names: Iterable[str]) -> nn.Module:
    """Return the original with some norms of the converted model; tensors are shared."""
    model = copy_model(original, share_all=True)
    for place in {place_of(converted, name) for name in names}:
        model.set_submodule(place, converted.get_submodule(place))
    return model


def _fit_alone(original, converted, names, batches, forward) -> list[str]:
    """Fit each norm on inputs and outputs of the original's; return the names as they ran."""
    found: dict[str, Moments] = {}
    real: list[Tensor | None] = []

    def see(name: str, x: Tensor, own: Tensor | None, y: Tensor) -> None:
        norm = converted.get_submodule(name)
        x, y = (each.movedim(norm.channel_dim, -1) for each in (x, y))
        x = norm.rest(x)
        own = real[-1] if own is None and real[-1] is not None and real[-1].shape == x.shape[:-1] else own
        rows = Moments.of(*(each.flatten(0, -2) if own is None else each[own] for each in (x, y)))
        found[name] = found[name].join(rows) if name in found else rows

    with seen(original, names, see):
        for batch in batches:
            real.append(mask_of(batch))
            call(original, batch, forward)
    for name, rows in found.items():
        if not rows.usable:
            raise ValueError(f"remove_norms() found no finite activations of real tokens at {name}")
        solve(converted.get_submodule(name), rows)
    return list(found)
