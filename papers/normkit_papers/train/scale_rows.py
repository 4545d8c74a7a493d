"""Scale the rows of an embedding table, in place of the norm that reads them."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.models import find
from normkit.models.third_party import equivalent, read_norm
from normkit.norms import Norm
from normkit_papers.train.distill import Outputs, relative_error

LENGTH = 32  # each token is measured at as many positions after the first
OCCURRED = 10.0  # weight of a token in a text
SAME = 0.01  # largest relative error of outputs


class _Found(Exception):
    """Ends a forward pass at the norm."""


@torch.no_grad()
def scale_rows(
    model: nn.Module, batches: Sequence[dict[str, Tensor]], outputs: Callable[[nn.Module, Any], Outputs]
) -> nn.Module:
    """Give each row of the embedding the scale that the first norm would give to its token.

    A norm with frozen statistics cannot treat tokens differently, but rows of a table can differ. LayerNorm's output
    does not depend on its input's scale, so models of the BERT family compute nearly the same with the new table.

    Args:
        model: A model of Hugging Face that reads tokens, in evaluation mode.
        batches: Inputs, from which the common scale is taken.
        outputs: Called as `outputs(model, batch)`.

    Returns:
        A copy with the new table. If more than the first norm reads the embeddings, the outputs change; if by more than
        1 % of their variance, the model itself.
    """
    table, old = model.get_input_embeddings(), model.get_submodule(next(iter(find(model))))  # type: ignore[operator]
    if not isinstance(table, nn.Embedding):
        return model
    length = min(LENGTH, max(batch["input_ids"].shape[1] for batch in batches) - 1)
    rest = (old if isinstance(old, Norm) else equivalent(read_norm(old))).split().rest
    mixed = torch.randperm(len(table.weight))
    mixed = torch.cat([mixed, mixed[: -len(mixed) % length]])
    masks = [batch["attention_mask"].bool() for batch in batches]
    read = [(b["input_ids"][real], _input(model, old, b)[real]) for b, real in zip(batches, masks, strict=True)]
    inputs = torch.cat([x for _, x in read])
    scale = (inputs * rest(inputs)).sum() / rest(inputs).square().sum()
    change, count = torch.zeros_like(table.weight), torch.zeros(len(table.weight), 1)

    def add(ids: Tensor, x: Tensor, weight: float) -> None:
        change.index_add_(0, ids, weight * (scale * rest(x) - x))
        count.index_add_(0, ids, torch.full((len(ids), 1), weight))

    for ids, x in read:  # where tokens really are: the first position is special
        add(ids, x, OCCURRED)
    for shift in range(length):
        for ids in mixed.roll(shift).view(-1, length).split(256):
            text = F.pad(ids, (1, 0), value=int(batches[0]["input_ids"][0, 0]))
            x = _input(model, old, {"input_ids": text, "attention_mask": torch.ones_like(text)})
            add(ids.flatten(), x[:, 1:].flatten(0, 1), 1.0)
    scaled = copy.deepcopy(model)
    scaled.get_input_embeddings().weight += change / count  # type: ignore[operator]
    (x, real, _), (y, _, _) = (outputs(each, batches[0]) for each in (scaled, model))
    return scaled if float(relative_error(x, y, real)) < SAME else model


def _input(model: nn.Module, norm: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return what a norm reads, `[batch, time, channels]`."""
    found: list[Tensor] = []

    def stop(norm: nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(args[0])
        raise _Found

    with norm.register_forward_pre_hook(stop):
        try:
            model(**batch)
        except _Found:
            return found[0]
    raise ValueError("the first norm of the model did not run")
