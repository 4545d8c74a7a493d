"""Hooks of norms: move channels to the last axis and back, take over those of another."""

import copy
from typing import Any, TypeVar

from torch import nn

from normkit.kernels.sync import is_group

T = TypeVar("T", bound=nn.Module)

HOOKS = [key for key in vars(nn.Module()) if "forward" in key or "backward" in key]  # not those of state_dict


def take_hooks(new: nn.Module, old: nn.Module) -> None:
    """Give a module the hooks of another; both have the same dictionaries then."""
    for hooks in HOOKS:
        setattr(new, hooks, getattr(old, hooks))


def copy_without_hooks(module: T, memo: dict[int, Any] | None = None) -> T:
    """Copy a module but for its hooks, which may hold what cannot be copied."""
    bare = copy.copy(module)
    take_hooks(bare, nn.Module())
    return copy.deepcopy(bare, share_groups(module) | (memo or {}))


def share_groups(model: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` by which copies share process groups, as of `nn.SyncBatchNorm`."""
    return {id(v): v for module in model.modules() for v in vars(module).values() if is_group(v)}


def channels_first(norm: T) -> T:
    """Make a norm take and return `[batch, channels, ...]`; the names of its parameters stay."""
    norm.channel_dim = 1  # type: ignore[assignment]
    norm.register_forward_pre_hook(_channels_to_the_end)  # after, and before, hooks that it may have already
    norm.register_forward_hook(_channels_to_the_front, prepend=True)
    return norm


def _channels_to_the_end(norm: nn.Module, args: tuple) -> tuple:
    return (args[0].movedim(1, -1), *args[1:])


def _channels_to_the_front(norm: nn.Module, args: tuple, output: Any) -> Any:
    return output.movedim(-1, 1)


LAYOUT_HOOKS = (_channels_to_the_end, _channels_to_the_front)
