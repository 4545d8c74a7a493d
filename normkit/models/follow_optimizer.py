"""Move the state of norms once per optimizer step, for any number of batches."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from normkit.models.checks import check_not_wrapped, norms_with_statistics
from normkit.norms import StatNorm

_HANDLES: weakref.WeakKeyDictionary[nn.Module, dict[int, Any]] = weakref.WeakKeyDictionary()  # by optimizer


class OptimizerLink:
    """Connection between norms and an optimizer; `remove()` ends it."""

    def __init__(self, model: weakref.ref[nn.Module], handle: Any):
        self._model, self._handle = model, handle

    def remove(self) -> None:
        """Move the state in each training forward again; drop pending statistics."""
        self._handle.remove()
        for norm in _norms(self._model()):
            if norm.follows_optimizer:
                _stop(norm)


def follow_optimizer(model: nn.Module, optimizer: Optimizer | None = None) -> OptimizerLink:
    """Move the running statistics of a model's norms once per optimizer step, in place.

    By default a norm with batch statistics moves its state in every training forward. Under gradient accumulation
    that is once per micro-batch. After this call each norm gathers the statistics of all batches since the last step,
    and moves its state by their joint statistics when the optimizer steps. A shorter last
    group of an epoch is handled, and a step that `GradScaler` skips moves no state.

    Checkpoints do not change. A copy of the model does not follow: call this again for it. Call it before
    `torch.compile`, and before the trainer starts. The statistics of batches that no optimizer step followed are not in
    checkpoints.

    Args:
        model: Model that is trained, after `convert`.
        optimizer: Optimizer to follow, or one that wraps it. None follows every `torch.optim.Optimizer` that holds a
            parameter of the model, also one that `Trainer` or Lightning creates later.

    Returns:
        A link whose `remove()` restores the default.

    Raises:
        ValueError: If the model has no norm with running statistics, or trains by other optimizers alone.

    Examples:
        >>> import normkit as nk
        >>> model = nk.convert(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 1)), "un")
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> link = nk.follow_optimizer(model, optimizer)
        >>> for _ in range(3):
        ...     model(torch.randn(8, 4)).mean().backward()
        >>> optimizer.step()
        >>> model[0].step
        tensor(1)
    """
    check_not_wrapped(model, "follow_optimizer")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch.optim.Optimizer or None; got {type(optimizer).__name__}")
    norms = norms_with_statistics(model, "follow_optimizer").values()
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if optimizer is not None and trained and trained.isdisjoint(_parameters(optimizer)):
        raise ValueError("the optimizer holds no parameter of the model; make it after convert(), which copies a model")
    for norm in norms:
        _start(norm)
    # a hook on all optimizers must keep neither alive; it is on all because a wrapper such as SAM steps another one
    reference, followed = weakref.ref(model), weakref.ref(model if optimizer is None else optimizer)

    def after_step(stepped: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        live, owner = reference(), followed()
        if live is None or owner is None or _parameters(owner).isdisjoint(_parameters(stepped)):
            return
        for norm in _norms(live):
            if norm.follows_optimizer:
                _move_state(norm, getattr(stepped, "found_inf", None))
            else:  # it came later, as by `convert`
                _start(norm)

    handle = register_optimizer_step_post_hook(after_step)
    weakref.finalize(model, handle.remove)
    earlier = _HANDLES.setdefault(model, {})
    if (key := id(optimizer)) in earlier:  # as where a script goes on after a checkpoint: one link, not two
        earlier[key].remove()
    earlier[key] = handle
    return OptimizerLink(reference, handle)


def _norms(model: nn.Module | None) -> Iterator[StatNorm]:
    return (module for module in (() if model is None else model.modules()) if isinstance(module, StatNorm))


def _parameters(owner: nn.Module | Optimizer) -> set[int]:
    groups = [{"params": owner.parameters()}] if isinstance(owner, nn.Module) else owner.param_groups
    return {id(parameter) for group in groups for parameter in group["params"]}


@torch.no_grad()
def _start(norm: StatNorm) -> None:
    """Add the buffers in which joint statistics and the next state wait; they are not saved."""
    if norm.follows_optimizer:
        return
    for name in ("pending", "pending_grad"):
        norm.register_buffer(name, norm.running.new_zeros(norm.running.numel() + 1), persistent=False)
    norm.follows_optimizer = True
    # the rules are pure: a trial call changes nothing, and names the buffers that a forward and a backward change
    batch, step = norm.running.clone(), norm.step + 1
    stat = norm.train_stat(batch, step, batch.new_ones(()), norm)
    changed = norm.grad_stat(batch, step, stat.saved, norm)[1]
    norm.next_state = {"pending": ("step", *stat.state), "pending_grad": tuple(changed)}
    for name in {name for names in norm.next_state.values() for name in names}:
        norm.register_buffer(f"next_{name}", getattr(norm, name).clone(), persistent=False)


def _stop(norm: StatNorm) -> None:
    norm.follows_optimizer, norm.next_state = False, {}
    for name in [name for name in norm._buffers if name.startswith(("next_", "pending"))]:
        delattr(norm, name)


@torch.no_grad()
def _move_state(norm: StatNorm, found_inf: Tensor | None) -> None:
    """Take over the next state where batches are pending, without waiting for the device."""
    for key, names in norm.next_state.items():
        pending = getattr(norm, key)
        moves = pending[-1] > 0
        if found_inf is not None:  # of GradScaler, 1 in a step that a fused optimizer skips by itself
            moves = moves & (found_inf.to(pending.device, non_blocking=True) == 0)
        for name in names:
            old = getattr(norm, name)
            old.copy_(torch.where(moves, getattr(norm, f"next_{name}"), old))
        pending.copy_(torch.where(moves, 0, pending))
