"""The scale loss, which draws the scales of tokens together where norms read them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit.kernels.records import is_recomputed
from normkit.models.checks import check_is_model
from normkit.models.convert import find
from normkit.models.invoke import input_and_mask
from normkit.models.take_apart import GatedNorm, take_apart
from normkit.norms import Norm


@contextmanager
def scale_loss(model: nn.Module) -> Iterator[Callable[[], Tensor]]:
    """Measure, inside the block, how unequal the scales of tokens are where norms read them.

    A norm with batch or frozen statistics divides all tokens by the same numbers, so a few large ones make all others
    small; this loss draws their scales together (Baroni et al. 2025, arXiv:2507.02559). Enter it once, for all steps.

    Args:
        model: The model that trains.

    Yields:
        A function that returns the loss of the forwards with gradients since its last call: the squared relative
        deviation of each token's root mean square from the batch's, averaged over tokens and sites. Padding is left out
        where the norm has a mask (`convert(..., mask_from=)`). It raises a ValueError if there were none, as under
        reentrant checkpointing.

    Examples:
        >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
        >>> with scale_loss(model) as scales:
        ...     loss = model(torch.randn(8, 4)).square().mean() + 0.1 * scales()
    """
    check_is_model(model, "scale_loss")
    axes = {
        norm: reading.channel_dim
        for name, reading in find(model).items()
        if not isinstance(take_apart(norm := model.get_submodule(name))[1], GatedNorm)  # hooks see no gated input
    }
    if not axes:
        raise ValueError("scale_loss() found no norm whose input it can measure; see normkit.find(model)")
    terms: list[Tensor] = []

    def measure(norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():  # no evaluation
            x, mask = input_and_mask(args, kwargs)
            x = x if isinstance(norm, Norm) else x.movedim(axes[norm], -1)  # normkit's norms have channels last
            term = scale_deviation(x, mask)
            terms.extend([] if is_recomputed() else [term])  # a recomputation saves the same tensors, and adds none

    def loss() -> Tensor:
        if not terms:
            raise ValueError("scales() needs a forward of the model, with gradients, since its last call")
        total = torch.stack(terms).mean()
        terms.clear()
        return total

    with ExitStack() as hooks:
        for norm in axes:
            hooks.enter_context(norm.register_forward_pre_hook(measure, with_kwargs=True))
        yield loss


def scale_deviation(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the mean squared relative deviation of real tokens' lengths from their root mean square.

    With `u = sqrt(mean(l^2))` of lengths l, `mean((l / u - 1)^2)` is `2 - 2 mean(l) / u`.
    """
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0)  # padding may hold anything
    length = torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))
    count = length.numel() if mask is None else mask.sum()
    most = torch.linalg.vector_norm(length) * count**0.5  # the sum, if all lengths are equal
    return 2 * (most - length.sum()) / most.clamp(min=torch.finfo(length.dtype).tiny)
