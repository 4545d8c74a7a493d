"""Pass masks to the norms of models whose blocks call `self.norm(x)` without one."""

import fnmatch
import inspect
import re
import threading
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import listed, warn
from normkit.kernels.records import is_recomputed
from normkit.norms import Norm

MaskFrom = str | Mapping[str, str] | None


def route_mask(model: nn.Module, mask_from: MaskFrom) -> None:
    """Pass an argument of the model's forward to its norms as their mask, in place.

    A single name serves both halves of an encoder-decoder: if the forward also takes `decoder_<name>`, norms under a
    module called "decoder" get that one. The meaning of an argument follows from its shape and name:

    - `[batch, tokens]`, bool or number: True or above 0.5 is real; in an argument named `...padding_mask` (PyTorch's),
      or given as `~name`, as in Python, it is padding. If no float is above 0, or one is below -1, they are added to
      scores, and real above -1;
    - `[batch, (heads,) queries, keys]`: True marks keys that a query attends to, numbers are added to the scores; a
      token to which any query attends is real.

    Where batch and length differ, norms' inputs show their layout. Before, `batch_first` of the model decides (set it
    where needed), else that of its modules, else the batch is first; where both are equal, a warning says what was
    taken.

    A mask belongs to the forward that runs, so copies of norms and models, and norms that models share, follow their
    own call. Where a mask does not fit a norm's input, the mask that the model itself derives from it is used: padded,
    subsampled or joined with another one (`derived_mask`; not in compiled code). Zeros that the model appends to the
    input are padding, too. A norm with batch statistics that trains without any raises a warning with both lengths. A
    pooled token, `[batch, channels]`, needs none. In a forward that activation checkpointing recomputes, norms with
    statistics have its own mask, others that of the last forward.

    Args:
        model: Model whose norms are normkit's.
        mask_from: Name of an argument, or rules from patterns of norm names to arguments; the first match applies.
            `~name` is one in which True is padding.

    Raises:
        ValueError: If the forward has no such argument, or no norm takes a mask from it.
    """
    norms = {name: module for name, module in model.named_modules() if isinstance(module, Norm)}
    given, names = argument_of_norms(model, mask_from, norms), list(inspect.signature(model.forward).parameters)
    used = set(given.values())
    others = [name for name in names if not {name, f"~{name}"} & used and _alike(name, str(mask_from))]
    for argument in sorted(used):
        if re.search(r"(?<!non_)(?<!non)(?<!not_)(?<!un)pad|ignor", argument.lower()) and not _marks_padding(argument):
            warn(f"in {argument} True counts as a real token; where it is padding give mask_from='~{argument}'")
    if isinstance(mask_from, str) and others:
        warn(
            f"the forward also takes {', '.join(others)}, and all norms take their mask from {mask_from}. If these are "
            f"masks of other tokens, give rules: mask_from={{'decoder.*': {others[0]!r}, '*': {mask_from!r}}}"
        )
    remove_routes(model)
    time_first, known = is_time_first(model), isinstance(getattr(model, "batch_first", None), bool)
    route = Route(names, _rules(mask_from, names), known or _layouts(model) == {True})
    for name, argument in given.items():
        norms[name].register_forward_pre_hook(GiveMask(argument, time_first), with_kwargs=True)
    model.register_forward_pre_hook(route.begin, with_kwargs=True)
    model.register_forward_hook(route.end, always_call=True)


def argument_of_norms(model: nn.Module, mask_from: MaskFrom, norms: Iterable[str]) -> dict[str, str]:
    """Return the argument from which each norm takes its mask; raises as `route_mask`."""
    parameters = inspect.signature(model.forward).parameters
    names = list(parameters)
    loose = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    rules = _rules(mask_from, names)
    for argument in rules.values():
        if argument.removeprefix("~") not in names and not loose:
            raise ValueError(f"the forward has no argument {argument!r} to take masks from; it has {', '.join(names)}")
    matching = {name: [a for pattern, a in rules.items() if fnmatch.fnmatchcase(name, pattern)] for name in norms}
    found = {name: arguments[0] for name, arguments in matching.items() if arguments}
    ours = set(rules.values()) - {mask_from} if isinstance(mask_from, str) else set()  # of a decoder without norms
    if unused := set(rules.values()) - set(found.values()) - ours:
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


class _Running(threading.local):
    """The calls of models with masks that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[MaskedCall] = []


_running = _Running()


class MaskedCall:
    """A running forward: the masks among its arguments, and the norms that none of them fits."""

    def __init__(self, route: "Route", model: nn.Module, given: dict[str, Any]):
        self.route, self.model, self.given = route, model, given
        self.masks: dict[str, Tensor | None] = {}
        self.derived: dict[tuple[str, torch.Size], Tensor] = {}  # by argument and shape of the norm's input
        self.unfit: dict[nn.Module, tuple[str, int, tuple[int, ...]]] = {}  # argument, its length, shape of the input

    def argument(self, norm: nn.Module, usual: str) -> str:
        """Return the argument for a norm: its usual one, unless another model now uses the norm."""
        if usual in self.given or torch.compiler.is_compiling():
            return usual
        name = next((name for name, module in self.model.named_modules() if module is norm), "")
        return next((a for pattern, a in self.route.rules.items() if fnmatch.fnmatchcase(name, pattern)), usual)

    def mask(self, name: str) -> Tensor | None:
        """Return the mask in an argument of this call, converted at its first use."""
        if name not in self.masks:
            given = self.given.get(name)
            self.masks[name] = None if given is None else real_tokens(given, name)
        return self.masks[name]


class Route:
    """Hooks of a model that open and close its calls. They keep no tensor, so that copies share nothing."""

    def __init__(self, names: list[str], rules: dict[str, str], is_layout_known: bool):
        self.names, self.rules = names, rules  # all arguments of the forward; patterns of norms' names -> argument
        self.is_layout_known = is_layout_known
        self.layouts = set[bool]()  # that norms have shown: True where time is first
        self.warned: set[str] = set()  # names of norms
        self.began = False  # a training step has ended

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of a copy, or of a model that was saved before layouts were kept."""
        self.__dict__.update({"is_layout_known": False, "layouts": set(), **state})

    def begin(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep the arguments of this call."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        self._close()  # what an interrupt left open
        _running.calls.append(
            MaskedCall(self, model, {name: given.get(name.removeprefix("~")) for name in self.rules.values()})
        )

    def end(self, model: nn.Module, args: tuple, output: object) -> None:
        """End the call; warn of masks that did not fit, and of training that begins without any."""
        for call in self._close():
            if not (self.began or torch.compiler.is_compiling()) and model.training and output is not None:
                self.began = True
                if lacking := [name for name, value in call.given.items() if value is None]:
                    which = "the norms" if len(lacking) == len(call.given) else "some norms"
                    warn(
                        f"{which} take their mask from {', '.join(lacking)}, and this training step has none: all of "
                        "their tokens count as real. Pass the mask, or leave it out of mask_from"
                    )
            if call.unfit and output is not None:
                names = [name for name, module in model.named_modules() if module in call.unfit]
                if new := [name for name in names if name not in self.warned]:
                    self.warned.update(new)
                    first = call.unfit[model.get_submodule(new[0])]
                    _warn(listed(new, 6), *first)

    def _close(self) -> list[MaskedCall]:
        ended = [call for call in _running.calls if call.route is self]
        if ended:
            _running.calls[:] = [call for call in _running.calls if call.route is not self]
        return ended


@torch.compiler.assume_constant_result  # so that compiling a forward warns, too
def _warn(norms: str, argument: str, length: int, shape: tuple[int, ...]) -> None:
    warn(
        f"norms that train without a mask: {norms}. {argument} has length {length} and does not fit the input of the "
        f"first one, of shape {[*shape, 'channels']}. Padding in such an input enters "
        "the statistics. Give the model a mask of the input's batch and length, or use a per-token norm there; where "
        "the input holds no padding, leave these norms out of the patterns of mask_from"
    )


class GiveMask:
    """Forward pre-hook of a norm that passes the mask of the running call, unless the norm has one."""

    is_shown = heads_second = False  # the layout of its inputs was seen; heads come before tokens

    def __init__(self, argument: str, time_first: bool):
        self.argument, self.time_first = argument, time_first
        self.last: MaskedCall | None = None  # for what activation checkpointing recomputes

    def __call__(self, norm: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        """Add `mask=` to the call."""
        compiles = torch.compiler.is_compiling()
        if len(args) > 1 or kwargs.get("mask") is not None or (compiles and not norm.training):
            return None  # a graph for inference needs no masks; to compare their axes would fix its sizes
        x = args[0] if args else kwargs["x"]
        mask = self._mask(norm, x, compiles)
        return None if mask is None else (args, {**kwargs, "mask": mask})

    def _mask(self, norm: Any, x: Tensor, compiles: bool) -> Tensor | None:
        shape = x.shape[:-1]
        follows = norm.training and not norm.batch_free and not compiles
        if _running.calls:
            self.last = call = _running.calls[-1]
        elif compiles or is_recomputed():  # a compiled part cannot detect recomputation
            call = self.last
        else:  # the model's `forward` was called without its hooks, as PEFT does
            return derived_mask(self.argument, shape, self.time_first) if follows else None
        argument = self.argument if call is None else call.argument(norm, self.argument)
        mask = None if call is None else call.mask(argument)
        if call is None or mask is None:
            return None
        self._see_layout(norm, call, mask, shape, warns=follows)
        fitted = fit(mask, shape, self.time_first, self.heads_second)
        if fitted is None and follows and not is_recomputed():
            fitted = derived_mask(argument, shape, self.time_first, call.model, call.route.names)
            if fitted is None:
                fitted = fit(prolonged(mask, x, self.time_first), shape, self.time_first)
            if fitted is None:
                fitted = call.derived.get((argument, shape))  # a model may drop it before the last norm
            else:
                call.derived[argument, shape] = fitted
        if fitted is None and norm.training and not norm.batch_free and len(shape) > 1:  # not for one token a sequence
            call.unfit[norm] = argument, mask.shape[1], tuple(shape)
        return fitted

    def _see_layout(self, norm: nn.Module, call: MaskedCall, mask: Tensor, shape: torch.Size, warns: bool) -> None:
        """Keep the layout that an input shows, for inputs of equal lengths, or flattened."""
        route, is_square = call.route, mask.shape[0] == mask.shape[1]
        if len(shape) == 3 and shape[1] != shape[2] and mask.shape[1] in shape[1:]:
            self.heads_second = shape[1] != mask.shape[1]
        if not is_square and shape in (mask.shape, mask.shape[::-1]):
            self.time_first, self.is_shown = shape != mask.shape, True
            if not torch.compiler.is_compiling():
                route.layouts.add(self.time_first)
        elif not self.is_shown and len(route.layouts) == 1:
            (self.time_first,) = route.layouts
        elif not (self.is_shown or route.is_layout_known) and warns and is_square and shape == mask.shape:
            route.is_layout_known = True  # one warning
            name = next(name for name, module in call.model.named_modules() if module is norm)
            taken = "[tokens, batch]" if self.time_first else "[batch, tokens]"
            warn(
                f"batch and length are {shape[0]}, so the layout of what {name} reads cannot be seen; it is taken as "
                f"{taken}. Set model.batch_first before convert(), or begin with a batch of another length"
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "last": None}


def unfit_length(norm: nn.Module) -> int | None:
    """Return the length of the mask of the running call if it does not fit the input of this norm."""
    lasts = [hook.last for hook in norm._forward_pre_hooks.values() if isinstance(hook, GiveMask)]
    return next((call.unfit[norm][1] for call in lasts if call in _running.calls and norm in call.unfit), None)


OTHER_TOKENS = ("encoder_", "decoder_", "cross_", "memory_", "global_", "visual_")  # in names of masks


def derived_mask(
    argument: str, shape: torch.Size, time_first: bool, model: object = None, names: Iterable[str] = ()
) -> Tensor | None:
    """Return the mask that a running forward has derived for an input of this shape, or None.

    Models that pad, subsample or join sequences do the same to the mask, and hold it in a variable such as
    `attention_mask` or `combined_attention_mask` until they pass it on. Nothing else knows it before the first norm.
    So the variables of the callers are searched, from the norm out to the forward of `model`, or the outermost one.
    Of its arguments, `names`, others are masks of other tokens.
    """
    others = {name for name in names if not argument.endswith(name)}
    inverted, argument = argument[: argument.startswith("~")], argument.removeprefix("~")
    found, frame = None, inspect.currentframe()
    while frame is not None:
        code, held = frame.f_code, frame.f_locals
        owner = held.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module):  # a method of a module
            for name, value in sorted(held.items(), key=lambda item: item[0] != argument):
                if not isinstance(value, Tensor) or name in others or not _can_derive(name, value, argument, inverted):
                    continue
                mask = fit(real_tokens(value, inverted + name), shape, time_first)
                if mask is not None and not value.is_floating_point():
                    return mask
                found = mask if found is None else found  # numbers that are added to scores may hold more than padding
        frame = None if owner is model and code.co_name == "forward" else frame.f_back
    return found


def prolonged(mask: Tensor, x: Tensor, time_first: bool) -> Tensor:
    """Prolong a mask `[batch, tokens]` by padding if all further tokens of `x` are zero."""
    axis, (batch, tokens) = (0 if time_first else 1), mask.shape
    if x.dim() != 3 or x.shape[1 - axis] != batch or x.shape[axis] <= tokens:
        return mask
    rest = x.shape[axis] - tokens
    return mask if x.narrow(axis, tokens, rest).any() else nn.functional.pad(mask, (0, rest))


def _can_derive(name: str, value: Tensor, argument: str, inverted: str) -> bool:
    """Return True for a variable that may hold a mask derived from an argument, by its name."""
    if name == "mask" != argument:
        return value.dim() == 2 and not _marks_padding(inverted + argument)
    return value.dim() in (2, 3, 4) and (name == argument or _alike(name, argument))


def _marks_padding(argument: str) -> bool:
    """Return True for an argument in which True is padding."""
    return argument.startswith("~") or argument.endswith("padding_mask")


def _alike(name: str, argument: str) -> bool:
    """Return True if two names end alike (`_padding_mask`), and the first names no other tokens."""
    kind = "_".join(argument.split("_")[-2:])
    other = any(word in name and word not in argument for word in OTHER_TOKENS)
    return "_" in kind and name.endswith(kind) and not other


def real_tokens(given: Tensor, name: str = "attention_mask") -> Tensor:
    """Convert a model's mask to `[batch, tokens]`, True for real tokens.

    Examples:
        >>> real_tokens(torch.tensor([[1, 1, 0]])).tolist(), real_tokens(torch.tensor([[1, 1, 0]]), "~pad").tolist()
        ([[True, True, False]], [[False, False, True]])
    """
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} must be a tensor for normkit to read a mask from it; got {type(given).__name__}")
    if given.dim() not in (2, 3, 4):
        allowed = "[batch, tokens] or [batch, (heads,) queries, keys]"
        raise ValueError(f"{name} must be {allowed}; got shape {tuple(given.shape)}")
    padding = _marks_padding(name)
    if given.dtype.is_floating_point:
        real = given > -1
        if given.dim() == 2:
            real = torch.where((given > 0).any() & real.all(), (given > 0.5) ^ padding, real)
    else:
        real = given.bool() ^ padding
    return real if given.dim() == 2 else real.flatten(1, -2).any(1)


def fit(mask: Tensor, shape: torch.Size, time_first: bool, heads_second: bool = False) -> Tensor | None:
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
        return fit(mask.expand(shape[0], tokens), shape, time_first, heads_second)
    if len(shape) == 3:  # [batch, tokens, heads], or [batch, heads, tokens]
        places = {1: mask[:, :, None], 2: mask[:, None, :]}
        fits = [place for place in places if (shape[0], shape[place]) == (batch, tokens)]
        return places[fits[-1 if heads_second else 0]].expand(shape) if fits else None
    return None


def _rules(mask_from: MaskFrom, names: list[str]) -> dict[str, str]:
    if isinstance(mask_from, Mapping):
        return dict(mask_from)
    if not isinstance(mask_from, str):
        raise TypeError(f"mask_from names an argument or is rules pattern -> name; got {type(mask_from).__name__}")
    bare = mask_from.removeprefix("~")
    if f"decoder_{bare}" in names:
        of_decoder = mask_from.replace(bare, f"decoder_{bare}")
        return {"decoder.*": of_decoder, "*.decoder.*": of_decoder, "*": mask_from}
    return {"*": mask_from}


def is_time_first(model: nn.Module) -> bool:
    """Return True if `batch_first` of the model, or else of all modules that have it, is off."""
    own = getattr(model, "batch_first", None)
    return not own if isinstance(own, bool) else _layouts(model) == {False}


def _layouts(model: nn.Module) -> set[bool]:
    found: list[Any] = [getattr(module, "batch_first", None) for module in model.modules()]
    return {each for each in found if isinstance(each, bool)}
