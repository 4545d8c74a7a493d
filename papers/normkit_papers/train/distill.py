"""Loss of a model against a teacher: distances of outputs and inner activations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Outputs(NamedTuple):
    """Outputs of a model for a batch.

    Attributes:
        values: Logits or vectors, `[..., channels]`.
        real: True for real tokens, in the shape of `values` without channels; None for all.
        logits: The values are logits; else vectors, whose mean over each sequence counts in the loss as well.
    """

    values: Tensor
    real: Tensor | None
    logits: bool


class Distillation(NamedTuple):
    """Loss of a model against a teacher: outputs and inner activations, without labels.

    Attributes:
        teacher: The original model.
        outputs: Called as `outputs(model, batch)`.
        sites: Names of the modules, in both models, whose outputs count as inner activations.
    """

    teacher: nn.Module
    outputs: Callable[[nn.Module, Any], Outputs]
    sites: Sequence[str]

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch."""
        with torch.no_grad(), captured(self.teacher, self.sites) as wanted:
            theirs = self.outputs(self.teacher, batch)
        with captured(model, self.sites) as found:
            mine = self.outputs(model, batch)
        inner = [relative_error(x, y, mask) for (x, mask), (y, _) in zip(found, wanted, strict=True)]
        total = distance(mine, theirs).mean() + torch.stack(inner).mean()
        if mine.logits:
            return total
        return total + 3 * (1 - F.cosine_similarity(pooled(mine, theirs.real), pooled(theirs, theirs.real))).mean()


def distance(mine: Outputs, theirs: Outputs) -> Tensor:
    """Return the distance of each real token's output from the original's, `[tokens]`.

    For logits the Kullback-Leibler divergence in nats, for vectors 1 - cosine.
    """
    x, y = (each.values.float() for each in (mine, theirs))
    x, y = (each.flatten(0, -2) if theirs.real is None else each[theirs.real] for each in (x, y))
    if theirs.logits:
        return F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    return 1 - F.cosine_similarity(x, y, dim=-1)


def pooled(outputs: Outputs, real: Tensor | None) -> Tensor:
    """Return the mean over the real tokens of each sequence, `[batch, channels]`."""
    values = outputs.values.float()
    weight = torch.ones_like(values[..., :1]) if real is None else real[..., None].float()
    return (values * weight).sum(1) / weight.sum(1)


@contextmanager
def captured(model: nn.Module, sites: Sequence[str]) -> Iterator[list[tuple[Tensor, Tensor | None]]]:
    """Collect, inside the block, outputs of modules with the masks that they get."""
    found: list[tuple[Tensor, Tensor | None]] = []

    def keep(module: nn.Module, args: tuple, kwargs: dict[str, Any], y: Tensor) -> None:
        found.append((y, kwargs.get("mask", args[1] if len(args) > 1 else None)))

    with ExitStack() as hooks:
        for name in sites:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(keep, with_kwargs=True))
        yield found


def relative_error(x: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Return the squared error over real tokens, relative to the variance of `y`."""
    x, y = x.float(), y.float()
    x, y = (x, y) if mask is None else (x[mask], y[mask])
    return F.mse_loss(x, y) / y.var()
