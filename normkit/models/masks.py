"""Pass masks to the norms of models whose blocks call `self.norm(x)` without one."""

import fnmatch
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import unique
from normkit.norms import Norm
from normkit.norms._recompute import is_recomputed

MaskFrom = str | Mapping[str, str] | None


def route_mask(model: nn.Module, mask_from: MaskFrom) -> None:
    """Pass an argument of the model's forward to its norms as their mask, in place.

    A single name serves both halves of an encoder-decoder: if the forward also takes `decoder_<name>`, norms under a
    module called "decoder" get that one. The meaning of an argument follows from its shape and name:

    - `[batch, tokens]`, bool or number: True or above 0.5 is real, or, if no float is above 0 (they are added to
      scores), above -1; in an argument named `...padding_mask` (PyTorch's) True, or a float below -1, is padding;
    - `[batch, (heads,) queries, keys]`: True marks keys that a query attends to, numbers are added to the scores; a
      token to which any query attends is real.

    A mask belongs to one forward: parts of the model that are called by themselves get none. In a forward that
    activation checkpointing recomputes, norms with statistics have its own mask, others that of the last forward. A
    norm whose input has another layout than the mask, such as a pooled token, gets none.

    Args:
        model: Model whose norms are normkit's.
        mask_from: Name of an argument, or rules from patterns of norm names to arguments; the first match applies.

    Raises:
        ValueError: If the forward has no such argument, or no norm takes a mask from it.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, Norm)}
    given, names = argument_of_norms(model, mask_from, norms), list(inspect.signature(model.forward).parameters)
    remove_routes(model)
    route, time_first = Route(names, unique(given.values())), is_time_first(model)
    for name, argument in given.items():
        norms[name].register_forward_pre_hook(GiveMask(route, argument, time_first), with_kwargs=True)
    model.register_forward_pre_hook(route.begin, with_kwargs=True)
    model.register_forward_hook(route.end, always_call=True)


def argument_of_norms(model: nn.Module, mask_from: MaskFrom, norms: Iterable[str]) -> dict[str, str]:
    """Return the argument from which each norm takes its mask; raises as `route_mask`."""
    parameters = inspect.signature(model.forward).parameters
    names = list(parameters)
    loose = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    rules = _rules(mask_from, names)
    for argument in rules.values():
        if argument not in names and not loose:
            raise ValueError(f"the forward has no argument {argument!r} to take masks from; it has {', '.join(names)}")
    matching = {name: [a for pattern, a in rules.items() if fnmatch.fnmatchcase(name, pattern)] for name in norms}
    found = {name: arguments[0] for name, arguments in matching.items() if arguments}
    if unused := set(rules.values()) - set(found.values()) - {f"decoder_{mask_from}"}:
        raise ValueError(f"no norm takes its mask from {', '.join(sorted(unused))}; check the patterns of mask_from")
    return found


def mask_arguments(model: nn.Module) -> dict[str, str]:
    """Return the argument that each norm takes its mask from, by the norm's name."""
    hooks = ((name, hook) for name, module in model.named_modules() for hook in module._forward_pre_hooks.values())
    return {name: hook.argument for name, hook in hooks if isinstance(hook, GiveMask)}


def remove_routes(model: nn.Module) -> None:
    """Remove the hooks of `route_mask`."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            ours = [key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", hook), Route | GiveMask)]
            for key in ours:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
                module._forward_hooks_always_called.pop(key, None)


class Route:
    """Hooks of a model that keep the masks of the current call for its norms."""

    def __init__(self, names: list[str], masks_from: tuple[str, ...]):
        self.names, self.masks_from = names, masks_from  # all arguments of the forward, those with masks
        self.given: dict[str, Any] = {}
        self.masks: dict[str, Tensor | None] = {}
        self.over = True  # False while a forward runs

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep the arguments of this call."""
        self.over, self.masks = False, {}
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        self.given = {name: given.get(name) for name in self.masks_from}

    def mask(self, name: str) -> Tensor | None:
        """Return the mask in an argument of this call, converted at its first use."""
        if name not in self.masks:
            given = self.given.get(name)
            self.masks[name] = None if given is None else real_tokens(given, name)
        return self.masks[name]

    def end(self, model: nn.Module, args: tuple, output: object) -> None:
        """Mark the end of the forward: from here on, only recomputed forwards get its masks."""
        self.over = True

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "given": {}, "masks": {}, "over": True}


class GiveMask:
    """Forward pre-hook of a norm that passes the mask of this call, unless it has one."""

    def __init__(self, route: Route, argument: str, time_first: bool):
        self.route, self.argument, self.time_first = route, argument, time_first

    def __call__(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Add `mask=` to the call."""
        if not norm.training and torch.compiler.is_compiling():
            return None  # a graph for inference needs no masks; to compare their axes would fix its sizes
        mask = self.route.mask(self.argument)
        if mask is None or len(args) > 1 or kwargs.get("mask") is not None:
            return None
        if self.route.over and not torch.compiler.is_compiling() and not is_recomputed():
            return None  # a compiled part cannot detect recomputation
        shape = (args[0] if args else kwargs["x"]).shape[:-1]
        if mask.shape[0] != mask.shape[1] and shape in (mask.shape, mask.shape[::-1]):
            self.time_first = shape != mask.shape  # known from here on, where both lengths are equal, too
        return args, {**kwargs, "mask": fit(mask, shape, self.time_first)}


def real_tokens(given: Tensor, name: str = "attention_mask") -> Tensor:
    """Convert a model's mask to `[batch, tokens]`, True for real tokens.

    Example:
        >>> real_tokens(torch.tensor([[1, 1, 0]])).tolist()
        [[True, True, False]]
    """
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor for normkit to read a mask from it; got {type(given).__name__}")
    if given.dim() not in (2, 3, 4):
        allowed = "[batch, tokens] or [batch, (heads,) queries, keys]"
        raise ValueError(f"{name} must be {allowed}; got shape {tuple(given.shape)}")
    padding = name.endswith("padding_mask")
    if given.dtype.is_floating_point:
        real = given > -1
        if given.dim() == 2 and not padding:
            real = torch.where((given > 0).any(), given > 0.5, real)
    else:
        real = given.bool() ^ padding
    return real if given.dim() == 2 else real.flatten(1, -2).any(1)


def fit(mask: Tensor, shape: torch.Size, time_first: bool) -> Tensor | None:
    """Fit a mask `[batch, tokens]` to an input with `x.shape[:-1] == shape`, or return None."""
    if len(shape) < 3 and time_first:
        mask = mask.T
    if mask.shape == shape:
        return mask
    batch, tokens = mask.shape
    if len(shape) == 1:  # [batch * tokens], or [batch * tokens * heads]
        heads, rest = divmod(shape[0], max(batch * tokens, 1))
        return None if rest else mask.flatten().repeat_interleave(heads)
    if batch == 1 and shape[0] != 1 and not time_first:  # one mask for the whole batch
        return fit(mask.expand(shape[0], tokens), shape, time_first)
    if len(shape) == 3 and tuple(shape[:2]) == (batch, tokens):  # [batch, tokens, heads]
        return mask[:, :, None].expand(shape)
    if len(shape) == 3 and (shape[0], shape[2]) == (batch, tokens):  # [batch, heads, tokens]
        return mask[:, None, :].expand(shape)
    return None


def _rules(mask_from: MaskFrom, names: list[str]) -> dict[str, str]:
    if isinstance(mask_from, Mapping):
        return dict(mask_from)
    if not isinstance(mask_from, str):
        raise TypeError(f"mask_from names an argument or is rules pattern -> name; got {type(mask_from).__name__}")
    if f"decoder_{mask_from}" in names:
        return {"decoder.*": f"decoder_{mask_from}", "*.decoder.*": f"decoder_{mask_from}", "*": mask_from}
    return {"*": mask_from}


def is_time_first(model: nn.Module) -> bool:
    """Return True if modules have `batch_first` and it is off, as in PyTorch's by default."""
    layouts = {m.batch_first for m in model.modules() if isinstance(getattr(m, "batch_first", None), bool)}
    return layouts == {False}
