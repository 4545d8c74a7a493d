"""Swap the norms of a model you did not write."""

import fnmatch
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import nn

from normkit.norms import NORMS, Norm, StatNorm, make, options, parse
from normkit.transforms.checks import copy_model, refuse_quantized, refuse_wrapped
from normkit.transforms.fastpath import leave_fast_path
from normkit.transforms.layout import channels_first
from normkit.transforms.masks import MaskFrom, route_mask
from normkit.transforms.model_changes import record_changes
from normkit.transforms.third_party import (
    CannotRead,
    Found,
    computes_a_weight,
    looks_like_a_norm,
    read,
    statistics,
    write,
)

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


def find(model: nn.Module) -> dict[str, Found]:
    """Every norm of the model that `convert` can read, by its name in the model.

    >>> list(find(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))))
    ['1']
    """
    found = {}
    for name, module in outermost(model).items():
        try:
            found[name] = read(module)
        except CannotRead:
            continue
    return found


def outermost(model: nn.Module, shared: bool = False) -> dict[str, nn.Module]:
    """A model's modules but for those inside a norm of ours and those that compute a weight.

    With `shared`, a shared one is there under each of its names.
    """
    modules: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=not shared):
        if not name.startswith(inside) and not computes_a_weight(name):
            modules[name] = module
            if isinstance(module, Norm):
                inside = (*inside, f"{name}." if name else "")
    return modules


def unreadable(model: nn.Module) -> dict[str, str]:
    """Modules whose class name says "norm" and that cannot be read, with the reason.

    >>> unreadable(nn.Sequential(nn.InstanceNorm1d(4)))
    {'0': 'no reader for the class name InstanceNorm1d'}
    """
    reasons = {}
    for name, module in outermost(model).items():
        if looks_like_a_norm(module):
            try:
                read(module)
            except CannotRead as error:
                reasons[name] = str(error)
    return reasons


def convert(
    model: nn.Module,
    to: str | Mapping[str, str],
    *,
    where: Callable[[str, nn.Module], bool] | None = None,
    mask_from: MaskFrom = None,
    inplace: bool = False,
) -> nn.Module:
    """Return the model with its norms replaced: by a spec, or by rules from name pattern to spec.

    Rules are tried in order and the first that matches a norm's name wins; a norm that none matches stays as it is.
    Patterns are those of `fnmatch`: `{"encoder.*": "un", "*.final_norm": "layer"}`. `where(name, module)` may say no.
    `weight` and `bias` are the same parameters under the same names, eps carries over unless the spec gives one, and so
    do hooks, device, dtype, training mode, sharing, and frozen statistics where both norms measure the same (not
    x before a layer-scale and after it). Another form of the same norm, `"dyt(bias=False)"` for `dyt` say, keeps the
    other options, all that was learned, and the state. A norm without bias gets one without. A norm that stores
    `weight - 1` (Gemma's) becomes one that stores `weight`: load its checkpoints before it is converted, not after.

    `mask_from` names the argument of the model's forward that marks real tokens, so that statistics never see padding:
    see `normkit.transforms.masks`. ValueError where nothing was converted or a pattern matches no norm; TypeError for
    wrapped, compiled or quantized models; a warning names norms that should be converted and cannot be read, which stay
    as they are. `inplace=False` leaves the given model alone.

    >>> convert(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "un(window=2)")[1]
    UN(4, un(window=2))
    """
    refuse_wrapped(model, "convert")
    refuse_quantized(model, "convert")
    chosen = chosen_sites(model, to, where, "convert")
    model = model if inplace else copy_model(model)
    made: dict[int, nn.Module] = {}  # one new module per old one, however often it is shared
    for name, spec in chosen.items():
        old = model.get_submodule(name)
        if id(old) not in made:
            made[id(old)] = replacement(old, spec, like=next(model.parameters(), None))
            made[id(made[id(old)])] = made[id(old)]  # so that its other names find it, too
        model = put(model, name, made[id(old)])
    leave_fast_path(model)
    if mask_from is not None:
        route_mask(model, mask_from)
    record_changes(model)
    return model


def chosen_sites(
    model: nn.Module, to: str | Mapping[str, str], where: Callable[[str, nn.Module], bool] | None, verb: str
) -> dict[str, str]:
    """The names of the norms to change with their specs, shared ones by every name; ValueError where there are none."""
    if not isinstance(to, str | Mapping):
        raise TypeError(f"{verb}() takes a spec such as 'un', or rules pattern -> spec; got {type(to).__name__}")
    rules = {"*": to} if isinstance(to, str) else dict(to)
    for pattern, spec in rules.items():
        if not isinstance(pattern, str):
            raise TypeError(f"rules go from a pattern of names, such as 'encoder.*', to a spec; got {pattern!r}")
        parse(spec)
    if where is not None and not callable(where):
        raise TypeError(f"where is a function of a norm's name and the norm; got {where!r}. By name: {{pattern: spec}}")
    every = outermost(model, shared=True)
    places = {name: module for name, module in every.items() if _readable(module)}
    if isinstance(to, Mapping):
        _refuse_idle_patterns(rules, list(places))
    meant, chosen = {}, {}
    for name, module in every.items():
        spec = next((spec for pattern, spec in rules.items() if fnmatch.fnmatchcase(name, pattern)), None)
        known = name in places
        if spec is not None and (known or looks_like_a_norm(module)) and (where is None or where(name, module)):
            (chosen if known else meant)[name] = spec
    if not chosen:
        raise ValueError(_nothing_found(model, list(places), verb))
    if meant:
        why = unreadable(model)
        left = _listed([f"{name} ({why[name]})" for name in meant if name in why], most=4)
        warnings.warn(f"{verb}() leaves norms as they are that it cannot read: {left}", stacklevel=3)
    return chosen


@torch.no_grad()
def replacement(old: nn.Module, spec: str, like: torch.Tensor | None = None) -> Norm:
    """A norm of the given spec with the parameters, statistics, hooks and mode of an old one (itself, if it is one).

    `like` gives device and dtype where the old norm has neither parameters nor buffers.
    """
    found = read(old)
    name, given = parse(spec)
    if isinstance(old, Norm) and parse(old.spec)[0] == name and all(old.option(k) == v for k, v in given.items()):
        return old
    computed = not isinstance(old, Norm) and found.weight is not old.weight
    if computed and found.weight is not None and found.weight.is_meta:
        raise ValueError(
            f"the gain of a {type(old).__name__} is not what its checkpoints keep (1 + weight), and on meta there is "
            "nothing to compute it from; load the weights, then convert"
        )
    given = {**_carried(found, name), **given}
    new = make(write(name, given), found.dim)
    for key in ("weight", "bias"):
        _carry(new, key, getattr(found, key))
    tensors = [t for t in (found.weight, found.bias, found.running, *old.buffers(), like) if t is not None]
    if tensors:
        new.to(tensors[0].device, tensors[0].dtype)
    _inherit(new, old, found)
    for hooks in HOOKS:
        setattr(new, hooks, getattr(old, hooks))
    if found.channel_dim != -1 and not isinstance(old, Norm):
        channels_first(new)
    elif isinstance(old, Norm) and hasattr(old, "channel_dim"):
        new.channel_dim = old.channel_dim  # type: ignore[assignment]
    return new.train(old.training)


def put(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """The model with `module` at `name`; the module itself where the name is that of the whole model."""
    if not name:
        return module
    model.set_submodule(name, module)
    return model


def _carried(found: Found, name: str) -> dict[str, object]:
    """What the new norm takes over from the old one's make-up, where its spec does not say otherwise."""
    kind, had = parse(found.kind)
    carried: dict[str, object] = {**(had if _akin(kind, name) else {}), "eps": found.eps}
    if had.get("sync") and "sync" in options(name):
        carried["sync"] = True
    if options(name)["affine"]:  # nonorm stays without, unless told
        affine = found.weight is not None or found.bias is not None
        carried.update(affine=affine, bias=affine and found.bias is not None)
    return carried


def _carry(new: Norm, key: str, value: torch.Tensor | None) -> None:
    """Give the new norm an old parameter: the very same one where the shapes agree."""
    mine = getattr(new, key)
    if mine is None or value is None:
        return
    if isinstance(value, nn.Parameter) and value.shape == mine.shape:
        setattr(new, key, value)
    elif value.shape == mine.shape:
        setattr(new, key, nn.Parameter(value.detach().clone(), value.requires_grad))
    else:  # ScaleNorm has one length: the mean of the old gains times its own
        length = mine.to(value.device, value.dtype) * value.mean()
        setattr(new, key, nn.Parameter(length, mine.requires_grad and value.requires_grad))


def _akin(one: str, other: str) -> bool:
    """Whether one norm is a form of the other, so that options and state mean the same in both."""
    return issubclass(NORMS[one], NORMS[other]) or issubclass(NORMS[other], NORMS[one])


def _inherit(new: Norm, old: nn.Module, found: Found) -> None:
    """Give the new norm what the old one learned besides weight and bias, and its state where that means the same."""
    same = getattr(old, "groups", 0) == getattr(new, "groups", 0)  # layer-scale comes before what is measured
    if isinstance(new, StatNorm) and found.running is not None and same:
        new.running.copy_(statistics(found.running, new.center))
    if not isinstance(old, Norm) or not _akin(parse(found.kind)[0], parse(new.spec)[0]):
        return
    with torch.device("cpu"):  # values, also where models are built on meta
        then, now = (dict(make(norm.spec, norm.dim).named_parameters()) for norm in (old, new))
    for key in then.keys() & now.keys():  # but what the spec asks to start otherwise
        if then[key].requires_grad == now[key].requires_grad and torch.equal(then[key], now[key]):
            setattr(new, key, getattr(old, key))
    state = {key: (mine, getattr(old, key)) for key, mine in new.named_buffers(recurse=False) if hasattr(old, key)}
    if same and all(mine.shape == theirs.shape for mine, theirs in state.values()):  # no count without its window
        for mine, theirs in state.values():
            mine.copy_(theirs)


def _readable(module: nn.Module) -> bool:
    try:
        read(module)
    except CannotRead:
        return False
    return True


def _refuse_idle_patterns(rules: dict[str, str], names: list[str]) -> None:
    for pattern in rules:
        if names and not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"the pattern {pattern!r} matches no norm; the norms are {_listed(names)}")


def _nothing_found(model: nn.Module, readable: list[str], verb: str) -> str:
    if readable:
        return f"{verb}() was told to change none of the norms that it found: {_listed(readable)}"
    seen = unreadable(model)
    if seen:
        named = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in list(seen.items())[:6])
        return f"{verb}() found no norm that it can read. It saw {named}. A row in transforms/third_party.py teaches it"
    kinds = sorted({type(module).__name__ for module in model.modules()})
    return f"{verb}() found no norm: no class in this model has 'norm' in its name. Classes seen: {_listed(kinds)}"


def _listed(names: list[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name or "(the model itself)" for name in names[:most]) + more
