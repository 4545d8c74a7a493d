"""Looking from inside a compiled graph: operators that call the recorder when the graph runs, and do nothing after it.

They claim to write to a tensor, the ledger, so that no compiler drops or reorders them, and so that a graph that was
captured on a GPU is split around them.
"""

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from normkit.norms._recompute import inside_backward

if TYPE_CHECKING:
    from normkit.watch.record import Recorder

LIVE: dict[int, "Recorder"] = {}
_KEYS = itertools.count(1)
_UNSAFE = (torch.Tag.cudagraph_unsafe,)  # a replayed CUDA graph would not call Python


def enter(recorder: "Recorder") -> int:
    """The number by which operators find a recorder."""
    key = next(_KEYS)
    LIVE[key] = recorder
    return key


def leave(key: int) -> None:
    """Graphs that still hold the number find nobody."""
    LIVE.pop(key, None)


def ledger(model: nn.Module) -> Tensor:
    """What the operators claim to write to."""
    first = next(model.parameters(), None)
    return torch.zeros(1, device=None if first is None else first.device)


@torch.library.custom_op("normkit::watch_tick", mutates_args={"ledger"}, tags=_UNSAFE)
def tick(ledger: Tensor, key: int) -> None:
    """A training step begins."""
    if key in LIVE:
        LIVE[key].tick()


@torch.library.custom_op("normkit::watch_input", mutates_args={"ledger"}, tags=_UNSAFE)
def look(x: Tensor, mask: Tensor | None, ledger: Tensor, key: int, site: int) -> None:
    """The input of a norm."""
    recorder = LIVE.get(key)
    if recorder is not None and recorder.due and not inside_backward():
        recorder.look(recorder.at(site), x, mask)


@torch.library.custom_op("normkit::watch_gradient", mutates_args={"ledger"}, tags=_UNSAFE)
def look_back(x: Tensor, dy: Tensor, mask: Tensor | None, ledger: Tensor, key: int, site: int) -> None:
    """The gradient of its output."""
    recorder = LIVE.get(key)
    if recorder is not None and recorder.due:
        recorder.look_back(recorder.step, recorder.at(site), x, dy, mask, None)


class Tap(torch.autograd.Function):
    """Passes `y` on, and its gradient back, having shown it."""

    @staticmethod
    def forward(ctx, y, x, mask, ledger, key, site):  # noqa: D102
        ctx.save_for_backward(x, mask)
        ctx.ledger, ctx.key, ctx.site = ledger, key, site
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):  # type: ignore[override]  # noqa: D102
        x, mask = ctx.saved_tensors
        look_back(x, dy, mask, ctx.ledger, ctx.key, ctx.site)
        return dy, None, None, None, None, None
