"""Statistics of a model's norms from data, without training: exact moments, no moving average."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit.kernels import ops, sync
from normkit.norms import StatNorm
from normkit.transforms.checks import copy_model, refuse_meta, refuse_wrapped
from normkit.transforms.invoke import call


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    passes: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Return the model with the running statistics of its norms computed from `batches`.

    **What is computed.** The model runs in evaluation mode (no dropout, no state moves), without gradients. In the
    first pass each norm divides each batch by that batch's own statistics, as in training ("precise" statistics);
    meanwhile

        running = sum over batches of sum over real rows of (x, x^2) / number of real rows

    of the inputs `x` of each norm, in float64: the mean and variance (or the quadratic mean) of all rows of all batches
    together, whatever their sizes and order. A group scaling that a norm does first is done first. Masks count: those
    that call sites pass, and those that `mask_from` routes.

    With `passes=2, 3, ...` each further pass repeats this with every norm dividing by the statistics of the pass
    before, as at inference. After p passes the first p - 1 norms of a chain, counted from the input, have exactly the
    statistics of what they are given at inference, and the others those of one pass earlier; use it for a model that
    was converted and not trained. `batches` is then gone through again, so it must not be a generator.

    A batch is what the model takes: a mapping of keywords, a tuple or list of arguments, or one argument;
    `forward(model, batch)` replaces that. `on_progress(batches done, pass)` is called after each batch. ValueError
    where no norm has statistics, no batch came, a norm never ran, or what reached it was not finite.

    >>> import normkit
    >>> model = nn.Sequential(normkit.make("pnv", 1, ))
    >>> calibrate(model, [torch.full((2, 1), 3.0), torch.full((6, 1), 1.0)])[0].running.tolist()
    [[3.0]]
    """
    refuse_wrapped(model, "calibrate")
    refuse_meta(model, "calibrate")
    if not isinstance(passes, int) or isinstance(passes, bool) or passes < 1:
        raise ValueError(f"passes must be a whole number of at least 1; got {passes!r}")
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | str | bytes | Mapping):
        kind = type(batches).__name__  # going through a single batch would make a batch of each of its rows
        raise TypeError(f"calibrate() takes batches to go through; got one {kind}. Give a list of it, [x], or a loader")
    if passes > 1 and iter(batches) is batches:
        raise ValueError(
            f"passes={passes} goes through the batches {passes} times; give a list or a loader, not a generator"
        )
    model = model if inplace else copy_model(model)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, StatNorm)}
    if not norms:
        raise ValueError(
            "calibrate() found no norm with running statistics; convert(model, 'un') or another offline norm first"
        )
    before = {name: norm.running.clone() for name, norm in norms.items()}
    with torch.no_grad(), evaluating(model):
        try:
            for index in range(passes):
                sums = _collect(model, norms, batches, forward, index, on_progress)
                for name, norm in norms.items():
                    norm.running.copy_(sums[name].statistics(name))
        except BaseException:
            for name, norm in norms.items():
                norm.running.copy_(before[name])
            raise
    return model


@contextmanager
def evaluating(model: nn.Module) -> Any:
    """The model in evaluation mode; afterwards each module in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _collect(model, norms, batches, forward, index, on_progress) -> dict[str, "_Sums"]:
    sums = {name: _Sums(norm, own=index == 0) for name, norm in norms.items()}
    handles = [norm.register_forward_pre_hook(sums[name], with_kwargs=True) for name, norm in norms.items()]
    done = 0
    try:
        for batch in batches:
            call(model, batch, forward)
            done += 1
            if on_progress is not None:
                on_progress(done, index + 1)
    finally:
        for handle in handles:
            handle.remove()
    if not done:
        raise ValueError("calibrate() was given no batches")
    if idle := [name for name, each in sums.items() if each.count is None]:
        raise ValueError(f"calibrate() cannot know the statistics of norms that never ran: {', '.join(idle)}")
    return sums


class _Sums:
    """Forward pre-hook of a norm: adds up its inputs; in the first pass it also lets the norm divide by each batch."""

    def __init__(self, norm: StatNorm, own: bool):
        self.center, self.own = norm.center, own
        self.sums: Tensor | None = None
        self.count: Tensor | None = None
        self.origin = torch.zeros_like(norm.running, dtype=torch.float64)

    def __call__(self, norm: StatNorm, args: tuple, kwargs: dict[str, Any]) -> None:
        x = kwargs["x"] if "x" in kwargs else args[0]
        mask = norm.check(x, kwargs.get("mask", args[1] if len(args) > 1 else None))
        batch, count = ops.moments(norm.rest(x).double(), mask, self.center)
        if self.sums is None:  # second moments are taken about the first batch's mean, which keeps their digits
            self.origin[: len(batch) - 1] = batch[0] if self.center else 0.0
        added = sync.pack(batch, count, self.origin)
        self.sums = added if self.sums is None else self.sums + added
        self.count = self.sums[-1]
        if self.own:
            norm.running.copy_(torch.where(count > 0, batch, norm.running))

    def statistics(self, name: str) -> Tensor:
        """The joint statistics `[k, dim]`."""
        assert self.sums is not None
        joint, count = sync.unpack(self.sums, self.origin)
        if not count > 0:
            raise ValueError(f"calibrate() cannot know the statistics of {name}: all its tokens were padding")
        if not joint.isfinite().all():
            raise ValueError(f"calibrate() cannot know the statistics of {name}: what reached it was not finite")
        return joint
