"""Fit offline norms to the norms that they replaced, by least squares."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import require_functions
from normkit.kernels import ops
from normkit.models.calibrate import evaluating, restored_on_error
from normkit.models.checks import check_not_meta, check_not_wrapped, copy_model, copy_unless, norms_with_statistics
from normkit.models.fastpath import no_fast_path
from normkit.models.invoke import Forward, call, check_batches, input_and_mask
from normkit.models.take_apart import take_norms_apart
from normkit.norms import RepBN, StatNorm


def fit_norms(
    model: nn.Module, like: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None, inplace: bool = False
) -> nn.Module:
    """Fit statistics, gain and bias of converted norms to the norms of the original.

    In the order in which they run, each norm gets the statistics of its input, and the gain and bias per channel that
    bring its output closest, in squared error over real tokens, to that of the original norm on the same batch. So a
    norm also corrects part of the error of those before it. `calibrate` sets statistics alone and keeps the gains,
    although channels of a LayerNorm's output do not have a mean square of 1.

    Args:
        model: Model with offline norms: `convert(like, "un")`. Both models run in evaluation mode.
        like: The original model.
        batches: Inputs of the model as in `calibrate`; a few thousand tokens suffice.
        forward: Called as `forward(model, batch)` in place of the model.
        inplace: Change the given model. By default it is copied.

    Returns:
        The model with fitted norms.

    Raises:
        ValueError: If no norm has statistics, one never ran, the original has no module of its name, there are no
            batches, or an activation was not finite.

    Example:
        >>> original = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        >>> import normkit
        >>> fit_norms(normkit.convert(original, "un"), original, [torch.randn(64, 4)])[1]
        UN(4, un)
    """
    for each in (model, like):
        check_not_wrapped(each, "fit_norms")
        check_not_meta(each, "fit_norms")
    if model is like:
        raise ValueError("fit_norms() got one model twice; pass the original as `like`, and convert a copy of it")
    require_functions(forward=forward)
    check_batches(batches, "fit_norms()")
    if not (batches := list(batches)):
        raise ValueError("fit_norms() was given no batches")
    model = copy_unless(inplace, model)
    norms = norms_with_statistics(model, "fit_norms")
    theirs = dict(like.named_modules(remove_duplicate=False))
    if any(name not in theirs for name in norms):  # a norm of a module of norm and activation
        take_norms_apart(like := copy_model(like), norms)
        theirs = dict(like.named_modules(remove_duplicate=False))
    if absent := [name for name in norms if name not in theirs]:
        raise ValueError(f"fit_norms() takes the model that was converted as `like`; it has no {', '.join(absent)}")
    with torch.no_grad(), evaluating(model), evaluating(like), restored_on_error(norms):
        calls: list[str] = []
        with ExitStack() as hooks:
            for name, norm in norms.items():
                hooks.enter_context(norm.register_forward_hook(lambda *_, name=name: calls.append(name)))
            call(model, batches[0], forward)
        if idle := sorted(set(norms) - set(calls)):
            raise ValueError(f"fit_norms() found norms that never ran on the first batch: {', '.join(idle)}")
        for name in dict.fromkeys(calls):
            rows = [row for batch in batches for row in _rows(model, norms[name], like, theirs[name], batch, forward)]
            x, y = (torch.cat([t.flatten(0, -2) for t in each]).double() for each in zip(*rows, strict=True))
            if not (x.isfinite().all() and y.isfinite().all() and len(x)):
                raise ValueError(f"fit_norms() found no finite activations of real tokens at {name}")
            if x.shape != y.shape:
                raise ValueError(f"fit_norms() takes the model that was converted as `like`; {name} differs in size")
            _solve(norms[name], x, y)
    return model


def _solve(norm: StatNorm, x: Tensor, y: Tensor) -> None:
    """Set statistics, gain and bias from rows `[n, dim]` of inputs and of wanted outputs."""
    statistics, _ = ops.moments(x, None, norm.center)
    norm.running.copy_(norm.pool(statistics))
    if norm.weight is None:
        return
    if isinstance(norm, RepBN):
        y = y - norm.a.double() * x
    z = x - norm.running[0].double() if norm.center else x
    z = z * torch.rsqrt(norm.running[-1].double() + norm.eps)
    mean_z, mean_y = (each.mean(0) if norm.bias is not None else torch.zeros_like(z[0]) for each in (z, y))
    z, y = z - mean_z, y - mean_y
    gain = (z * y).sum(0) / z.square().sum(0).clamp(min=torch.finfo(z.dtype).tiny)
    norm.weight.copy_(gain)
    if norm.bias is not None:
        norm.bias.copy_(mean_y - gain * mean_z)


def _rows(
    model: nn.Module, norm: StatNorm, like: nn.Module, old: nn.Module, batch: Any, forward: Forward | None
) -> list[tuple[Tensor, Tensor]]:
    """Return real tokens that a norm reads and the old one's outputs, for each run."""
    read: list[tuple[Tensor, Tensor | None]] = []
    wanted: list[Tensor] = []

    def keep_input(norm: StatNorm, args: tuple, kwargs: dict[str, Any], y: Tensor) -> None:
        x, mask = input_and_mask(args, kwargs)
        read.append((norm.rest(x).clone(), norm.check(x, mask)))  # what follows may change x, and y below, in place

    inputs = norm.register_forward_hook(keep_input, with_kwargs=True)
    with inputs, old.register_forward_hook(lambda _, args, y: wanted.append(y.movedim(norm.channel_dim, -1).clone())):
        call(model, batch, forward)
        with no_fast_path():
            call(like, batch, forward)
    return [(x, y) if mask is None else (x[mask], y[mask]) for (x, mask), y in zip(read, wanted, strict=True)]
