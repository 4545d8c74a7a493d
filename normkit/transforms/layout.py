"""Hooks that let a channels-last norm take the place of one whose channels come first."""

from typing import Any, TypeVar

from torch import nn

T = TypeVar("T", bound=nn.Module)


def channels_first(norm: T) -> T:
    """Make a norm take and return `[batch, channels, ...]`; the names of its parameters stay.

    Example:
        >>> import torch
        >>> from normkit.norms import LayerNorm
        >>> channels_first(LayerNorm(3))(torch.zeros(2, 3, 5, 7)).shape
        torch.Size([2, 3, 5, 7])
    """
    norm.channel_dim = 1  # type: ignore[assignment]
    norm.register_forward_pre_hook(_channels_to_the_end)  # after, and before, hooks that it may have already
    norm.register_forward_hook(_channels_to_the_front, prepend=True)
    return norm


def is_layout_hook(hook: object) -> bool:
    """Return True for one of these two hooks."""
    return hook in (_channels_to_the_end, _channels_to_the_front)


def _channels_to_the_end(norm: nn.Module, args: tuple) -> tuple:
    return (args[0].movedim(1, -1), *args[1:])


def _channels_to_the_front(norm: nn.Module, args: tuple, output: Any) -> Any:
    return output.movedim(-1, 1)
