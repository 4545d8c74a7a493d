"""Compute the running statistics of norms from data, without training."""

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import require, require_functions
from normkit.kernels import ops, sync
from normkit.models.checks import check_not_meta, check_not_wrapped, copy_unless, norms_with_statistics
from normkit.models.fit import fit_like, set_statistics
from normkit.models.invoke import Forward, call, check_batches, input_and_mask
from normkit.norms import StatNorm


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    like: nn.Module | None = None,
    forward: Forward | None = None,
    on_progress: Callable[[int, int], object] | None = None,
    inplace: bool = False,
) -> nn.Module:
    """Set the running statistics of a model's norms from data, without training.

    The model runs in evaluation mode without gradients. Each norm divides each batch by that batch's own statistics, as
    in training ("precise" statistics). The running statistics become mean and variance (or the
    quadratic mean) of the inputs over the real tokens of all batches together. They are computed in float64, whatever
    the sizes and the order of the batches. Masked tokens are left out.

    With `like`, the original of a converted model, each norm also gets the gain and bias per channel that bring its
    output closest, in squared error over real tokens, to that of the original norm. Norms are solved in the order in
    which they run, so each also corrects part of the error of those before it. Both models compute each batch once, all
    batches side by side; the original computes the first once more, and a norm that runs several times in a forward
    costs a forward of both models. Memory holds the batches, and what their forwards need at one norm; give
    `use_cache=False` to language models.

    Args:
        model: Model with norms that have running statistics (`convert(original, "un")`).
        batches: Inputs of the model: mappings of keywords, tuples or lists of arguments, or single arguments. With
            `like` a few thousand tokens suffice.
        like: The original model, to which the norms are fitted. None keeps gains and biases.
        forward: Called as `forward(model, batch)` in place of the model. With `like` it gets copies of both models,
            which share their tensors, and the batches must not depend on each other.
        on_progress: With `like`, called as `on_progress(norms fitted, norms)` after each norm.
        inplace: Change the given model. By default it is copied.

    Returns:
        The model with new running statistics.

    Raises:
        ValueError: If no norm has statistics, there are no batches, a norm never ran, or its input was not finite; if
            `like` is not the original, or `on_progress` is given without it.
        TypeError: If `batches` is a single batch.

    Examples:
        >>> import normkit
        >>> model = nn.Sequential(normkit.make("pnv", 1))
        >>> calibrate(model, [torch.full((2, 1), 3.0), torch.full((6, 1), 1.0)])[0].running.tolist()
        [[3.0]]
        >>> original, batches = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), [torch.randn(64, 4)]
        >>> calibrate(normkit.convert(original, "un"), batches, like=original)[1]
        UN(4, un)
    """
    for each in (model,) if like is None else (model, like):
        check_not_wrapped(each, "calibrate")
        check_not_meta(each, "calibrate")
    require_functions(forward=forward, on_progress=on_progress)
    check_batches(batches, "calibrate()")
    require(like is not None or on_progress is None, "on_progress", on_progress, "None without like=")
    if model is like:
        raise ValueError("calibrate() got one model twice; pass the original as `like`, and convert a copy of it")
    model = copy_unless(inplace, model)
    norms = norms_with_statistics(model, "calibrate")
    with torch.no_grad(), evaluating(model), restored_on_error(norms):
        if like is not None:
            with evaluating(like):
                fit_like(model, norms, like, list(batches), forward, on_progress)
            return model
        for norm, stat in _measure(model, norms, batches, forward).items():
            set_statistics(norm, stat)
    return model


@contextmanager
def evaluating(model: nn.Module) -> Any:
    """Put a model into evaluation mode, and each module back into its mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():  # parents first
            module.train(mode)


@contextmanager
def restored_on_error(norms: Mapping[str, StatNorm]) -> Any:
    """Give norms their parameters and statistics back if the block raises."""
    before = {name: copy.deepcopy(norm.state_dict()) for name, norm in norms.items()}
    try:
        yield
    except BaseException:
        for name, norm in norms.items():
            norm.load_state_dict(before[name])
        raise


def _measure(model, norms, batches, forward) -> dict[StatNorm, Tensor]:
    """Run the batches, and return the statistics `[k, dim]` of each norm's inputs."""
    joint: dict[StatNorm, tuple[Tensor, Tensor]] = {}  # statistics and number of rows

    def join(norm: StatNorm, args: tuple, kwargs: dict[str, Any]) -> None:
        x, mask = input_and_mask(args, kwargs)
        mask = norm.check(x, mask)
        batch, count = ops.moments(norm.rest(x).double(), mask, norm.center)
        joint[norm] = sync.join(*joint[norm], batch, count, norm.center) if norm in joint else (batch, count)
        norm.running.copy_(torch.where(count > 0, batch, norm.running))  # by which it then divides

    is_empty = True
    with ExitStack() as hooks:
        for norm in norms.values():
            hooks.enter_context(norm.register_forward_pre_hook(join, with_kwargs=True))
        for batch in batches:
            call(model, batch, forward)
            is_empty = False
    if is_empty:
        raise ValueError("calibrate() was given no batches")
    if idle := [name for name, norm in norms.items() if norm not in joint]:
        raise ValueError(f"calibrate() found norms that never ran, so they have no statistics: {', '.join(idle)}")
    for name, norm in norms.items():
        stat, count = joint[norm]
        if not count > 0:
            raise ValueError(f"calibrate() found no statistics for {name}: all its tokens were padding or missing")
        if not stat.isfinite().all():
            raise ValueError(f"calibrate() found no statistics for {name}: its input was not finite")
    return {norm: stat for norm, (stat, _) in joint.items()}
