"""Operators that let a recorder measure inside a compiled graph.

When the graph runs they call the recorder; after recording has ended they do nothing. They declare that they write to
a tensor, the ledger, so that no compiler drops or reorders them, and that a captured CUDA graph is split around them.
"""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from normkit.kernels.records import is_recomputed

LISTENERS: dict[int, Any] = {}  # recorders; not imported here, for they import this module
_KEYS = itertools.count(1)
_UNSAFE = (torch.Tag.cudagraph_unsafe,)  # a replayed CUDA graph would not call Python


def register(listener: Any) -> int:
    """Return the key by which the operators find a recorder, as long as it is in `LISTENERS`."""
    key = next(_KEYS)
    LISTENERS[key] = listener
    return key


@torch.library.custom_op("normkit::watch_tick", mutates_args={"ledger"}, tags=_UNSAFE)
def begin_step(ledger: Tensor, key: int) -> None:
    """Begin a training step."""
    if key in LISTENERS:
        LISTENERS[key].begin_step()


@torch.library.custom_op("normkit::watch_input", mutates_args={"ledger"}, tags=_UNSAFE)
def sample_input(x: Tensor, mask: Tensor | None, ledger: Tensor, key: int, norm: int) -> None:
    """Measure the input of a norm."""
    listener = LISTENERS.get(key)
    if listener is not None and listener.due and not is_recomputed():
        listener.norms[norm].sample_input(x, mask)


@torch.library.custom_op("normkit::watch_gradient", mutates_args={"ledger"}, tags=_UNSAFE)
def sample_gradient(x: Tensor, dy: Tensor, mask: Tensor | None, ledger: Tensor, key: int, norm: int) -> None:
    """Measure the gradient of its output."""
    listener = LISTENERS.get(key)
    if listener is not None and listener.due:
        listener.norms[norm].sample_gradient(listener.step, x, dy, listener.norms[norm].choose_mask(x, mask), None)


class Tap(torch.autograd.Function):
    """Passes `y` on unchanged, and measures its gradient in the backward pass."""

    @staticmethod
    def forward(ctx, y, x, mask, ledger, key, norm):  # noqa: D102
        ctx.save_for_backward(x, mask)
        ctx.found = ledger, key, norm
        return y.clone()  # no view, which the model could not change in place

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, mask = ctx.saved_tensors
        sample_gradient(x, dy, mask, *ctx.found)
        return dy, None, None, None, None, None
