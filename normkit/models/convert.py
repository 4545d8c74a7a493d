"""Find the norms of any model, and replace them."""

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from normkit._util import listed, warn
from normkit.models.checks import check_is_model, check_not_quantized, check_not_wrapped, copy_unless
from normkit.models.fastpath import leave_fast_path
from normkit.models.hooks import channels_first, take_hooks
from normkit.models.masks import MaskFrom, argument_of_norms, route_mask
from normkit.models.model_changes import record_changes
from normkit.models.take_apart import take_apart
from normkit.models.third_party import CannotRead, Found, is_named_norm, read_norm, real_tensors, statistics, write
from normkit.norms import NORMS, Norm, StatNorm, make, options, parse

Specs = str | Mapping[str, str]  # one spec, or rules from patterns of names to specs
Where = Callable[[str, nn.Module], bool]  # chooses norms by name and module


def find(model: nn.Module) -> dict[str, Found]:
    """Find the norms that `convert` can replace.

    Args:
        model: Any PyTorch model.

    Returns:
        What each norm computes, by its name in the model.

    Examples:
        >>> list(find(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))))
        ['1']
    """
    check_is_model(model, "find")
    modules = outermost(model).items()
    return {name: reading for name, module in modules if isinstance(reading := _try_read(module), Found)}


def outermost(model: nn.Module, shared: bool = False) -> dict[str, nn.Module]:
    """Return modules by name, without the insides of normkit's norms and of parametrizations.

    With `shared`, a shared module appears under each of its names.
    """
    modules: dict[str, nn.Module] = {}
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=not shared):
        if not name.startswith(inside) and not is_parametrization(name):
            modules[name] = module
            if isinstance(module, Norm):
                inside = (*inside, f"{name}." if name else "")
    return modules


def is_parametrization(name: str) -> bool:
    """Return True for the name of a parametrization, such as weight norm."""
    return "parametrizations" in name.split(".")


def unreadable(model: nn.Module) -> dict[str, str]:
    """Find modules named like norms that `convert` cannot replace, with the reason.

    Examples:
        >>> unreadable(nn.Sequential(nn.InstanceNorm1d(4)))
        {'0': 'no reader for the class name InstanceNorm1d'}
    """
    check_is_model(model, "unreadable")
    named = {name: _try_read(module) for name, module in outermost(model).items() if is_named_norm(module)}
    return {name: reading for name, reading in named.items() if isinstance(reading, str)}


def _try_read(module: nn.Module) -> Found | str:
    """Return what the norm of a module computes, or the reason why it cannot be read."""
    try:
        return read_norm(take_apart(module)[0])
    except CannotRead as reason:
        return str(reason)  # the exception would keep the frames, and so the model, alive


def convert(
    model: nn.Module, to: Specs, *, where: Where | None = None, mask_from: MaskFrom = None, inplace: bool = False
) -> nn.Module:
    """Replace the norms of a model.

    A new norm has the same `weight` and `bias` parameters under the same names. It also takes over hooks, device,
    dtype, training mode, sharing, eps, a missing bias, and frozen statistics if both norms measure the same. If the
    spec names another form of the same norm ("dyt(bias=False)" for "dyt"), the other options, all parameters and the
    state stay.

    A norm that stores `weight - 1` (Gemma's) becomes one that stores `weight`, and a module of norm and activation
    (timm's `BatchNormAct2d`) an `nn.Sequential` with the new norm as `norm`: load checkpoints of such models before
    they are converted. The specs of a model of transformers are recorded in `model.config`, see `save_pretrained`.

    Args:
        model: Any PyTorch model that is not wrapped, compiled or quantized.
        to: A spec such as "un(window=2)", or rules from patterns of names (as in `fnmatch`) to specs, such as
            `{"encoder.*": "un", "*.final_norm": "layer"}`. The first pattern that matches a norm's name applies; a
            norm that none matches stays.
        where: Called with name and norm; a norm for which it returns False stays.
        mask_from: Name of the argument of the model's forward that marks real tokens (`~name`: padding), or rules from
            patterns of names to arguments. The norms then leave padding out of their statistics. See
            `normkit.models.masks`.
        inplace: Change the given model. By default it is copied.

    Returns:
        The converted model. A warning names norms that should be converted but cannot be read; they stay.

    Raises:
        ValueError: If nothing was converted, a pattern matches no norm, or a spec is wrong.
        TypeError: If the model is wrapped, compiled or quantized.

    Examples:
        >>> convert(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "un")[1]
        UN(4, un)
    """
    chosen = _chosen(model, to, where)
    model = copy_unless(inplace, model)
    like = next(model.parameters(), None)
    sites = {name: model.get_submodule(name) for name in chosen}  # nothing changes before all of them are built
    new: dict[nn.Module, tuple[nn.Module, nn.Module, nn.Module | None]] = {}
    for name, old in sites.items():
        if old not in new:
            norm, whole = take_apart(old)
            new[old] = norm, replacement(norm, chosen[name], like), whole
    if mask_from is not None and "" not in sites:
        norms = [name for name, module in model.named_modules() if isinstance(module, Norm)]
        norms += [f"{name}.norm" if new[old][2] else name for name, old in sites.items()]
        argument_of_norms(model, mask_from, norms)
    for norm, built, whole in new.values():
        take_place(built, norm)
        if whole is not None:
            put(whole, {"norm": built})
    model = put(model, {name: new[old][2] or new[old][1] for name, old in sites.items()})
    leave_fast_path(model)
    if mask_from is not None:
        route_mask(model, mask_from)
    record_changes(model)
    return model


def _chosen(model: nn.Module, to: Specs, where: Where | None) -> dict[str, str]:
    """Return specs by name for the norms to change; a shared norm has several entries."""
    check_not_wrapped(model, "convert")
    check_not_quantized(model, "convert")
    if not isinstance(to, str | Mapping):
        raise TypeError(f"convert() takes a spec such as 'un', or rules pattern -> spec; got {type(to).__name__}")
    rules = {"*": to} if isinstance(to, str) else dict(to)
    for pattern, spec in rules.items():
        if not isinstance(pattern, str):
            raise TypeError(f"rules go from a pattern of names, such as 'encoder.*', to a spec; got {pattern!r}")
        parse(spec)
    if where is not None and not callable(where):
        raise TypeError(f"where is a function of a norm's name and the norm; got {where!r}. By name: {{pattern: spec}}")
    every = outermost(model, shared=True)
    readings = {name: _try_read(module) for name, module in every.items()}
    readable = [name for name, reading in readings.items() if isinstance(reading, Found)]
    for pattern in rules:
        if readable and not any(fnmatch.fnmatchcase(name, pattern) for name in readable):
            raise ValueError(f"the pattern {pattern!r} matches no norm; the norms are {listed(readable, 12)}")
    meant, chosen = {}, {}
    for name, module in every.items():
        spec = next((spec for pattern, spec in rules.items() if fnmatch.fnmatchcase(name, pattern)), None)
        if spec is not None and (name in readable or is_named_norm(module)) and (where is None or where(name, module)):
            (chosen if name in readable else meant)[name] = spec
    if not chosen:
        raise ValueError(_nothing_found(model, readable))
    if meant:
        left = listed((f"{name} ({readings[name]})" for name in meant), most=4)
        warn(f"convert() leaves norms as they are that it cannot read: {left}")
    return chosen


@torch.no_grad()
def replacement(old: nn.Module, spec: str, like: torch.Tensor | None = None) -> Norm:
    """Build a norm with the parameters, statistics and mode of an old one.

    `take_place` adds the hooks. Returns the old norm if the spec describes it. `like` gives device and dtype if the old
    norm has no tensors.
    """
    found = read_norm(old)
    name, given = parse(spec)
    if isinstance(old, Norm) and not isinstance(old, tuple(NORMS.values())):
        raise ValueError(f"{old.spec} cannot be replaced; add your own class to NORMS")
    if isinstance(old, Norm) and parse(old.spec)[0] == name and all(old.option(k) == v for k, v in given.items()):
        return old
    computed = not isinstance(old, Norm) and found.weight is not getattr(old, "weight", None)
    if computed and found.weight is not None and found.weight.is_meta:
        gain = f"the gain of a {type(old).__name__} is 1 + weight, which is not known on the meta device"
        raise ValueError(f"{gain}; load the weights, then convert")
    group = found.group if "sync" not in given else None
    given = {**_carried(found, name), **given}
    tensors = [t for t in (found.weight, found.bias, found.running, *old.buffers(), like) if t is not None]
    with _made_like(next((t for t in tensors if t.is_floating_point()), None)):
        new: Any = make(write(name, given), found.dim)
    if group is not None and "sync" in options(name):
        new.sync = group
    new.contiguous = found.contiguous
    for key in ("weight", "bias"):
        _carry(new, key, getattr(found, key))
    _inherit(new, old, found)
    new.channel_dim = found.channel_dim
    return new.train(old.training)


@contextmanager
def _made_like(tensor: torch.Tensor | None) -> Iterator[None]:
    """Make modules on the device and in the type of a tensor, if there is one."""
    before = torch.get_default_dtype()
    try:
        with nullcontext() if tensor is None else tensor.device:
            torch.set_default_dtype(before if tensor is None else tensor.dtype)
            yield
    finally:
        torch.set_default_dtype(before)


def take_place(new: Any, old: nn.Module) -> None:
    """Give a norm of normkit the hooks of the one whose place it takes."""
    if new is old:
        return
    take_hooks(new, old)
    if new.channel_dim != -1 and not isinstance(old, Norm):
        channels_first(new)


def put(model: nn.Module, new: Mapping[str, nn.Module]) -> nn.Module:
    """Put modules in the places with these names ("" is the model); return the model.

    Lists, tuples and dicts in which modules keep others beside their children follow, as a forward may use them.
    """
    old = {model.get_submodule(name): module for name, module in new.items()}
    for name in filter(None, new):
        model.set_submodule(name, new[name])
    model = new.get("", model)
    gone, own = old.keys() - set(model.modules()), vars(nn.Module()).keys()
    for module in model.modules():
        for key in vars(module).keys() - own:
            held = vars(module)[key]
            leaves = pytree.tree_leaves(held) if isinstance(held, list | tuple | dict) else ()
            if any(isinstance(each, nn.Module) and each in gone for each in leaves):
                vars(module)[key] = pytree.tree_map_only(nn.Module, lambda each: old.get(each, each), held)
    return model


def put_everywhere(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put a module in the place of another one under all names that it has."""
    old = model.get_submodule(name)
    return put(model, {each: module for each, there in model.named_modules(remove_duplicate=False) if there is old})


def _carried(found: Found, name: str) -> dict[str, object]:
    """Return the options that a new norm inherits unless its spec sets them."""
    kind, had = parse(found.kind)
    carried: dict[str, object] = {**(had if _akin(kind, name) else {}), "eps": found.eps}
    if had.get("sync") and "sync" in options(name):
        carried["sync"] = True
    if options(name)["affine"]:  # nonorm has no parameters by default
        affine = found.weight is not None or found.bias is not None
        carried.update(affine=affine, bias=affine and found.bias is not None)
    return carried


def _carry(new: Norm, key: str, value: torch.Tensor | None) -> None:
    """Give the new norm an old parameter, the same object if the shapes agree."""
    mine = getattr(new, key)
    if mine is None or value is None:
        return
    if value.shape != mine.shape:  # ScaleNorm has one length: the mean of the old gains times its own
        length = mine.to(value.device, value.dtype) * value.mean()
        value = nn.Parameter(length, mine.requires_grad and value.requires_grad)
    elif not isinstance(value, nn.Parameter):
        value = nn.Parameter(value.detach().clone(), value.requires_grad)
    setattr(new, key, value)


def _akin(one: str, other: str) -> bool:
    """Return True if one norm is a form of the other: options and state mean the same in both."""
    return issubclass(NORMS[one], NORMS[other]) or issubclass(NORMS[other], NORMS[one])


def _inherit(new: Norm, old: nn.Module, found: Found) -> None:
    """Give the new norm the old one's further parameters, and its state if both mean the same."""
    same = getattr(old, "groups", 0) == getattr(new, "groups", 0)  # layer-scale comes before what is measured
    if isinstance(new, StatNorm) and found.running is not None and same:
        new.running.copy_(statistics(found.running, new.center))
    if not isinstance(old, Norm) or not _akin(parse(found.kind)[0], parse(new.spec)[0]):
        return
    with real_tensors():
        then, now = (dict(make(norm.spec, norm.dim).named_parameters()) for norm in (old, new))
        same_start = {
            key for key in then.keys() & now.keys()
            if then[key].requires_grad == now[key].requires_grad and torch.equal(then[key], now[key])
        }  # fmt: skip
    for key in same_start:  # not those whose start the spec changes
        setattr(new, key, getattr(old, key))
    state = {key: (mine, getattr(old, key)) for key, mine in new.named_buffers(recurse=False) if hasattr(old, key)}
    if same and all(mine.shape == theirs.shape for mine, theirs in state.values()):  # no count without its window
        for mine, theirs in state.values():
            mine.copy_(theirs)


OWN = (
    "A norm of your own is read if its class name ends in LayerNorm or RMSNorm, and its gain and bias are called"
    " weight and bias; or put norms of normkit in its place, such as normkit.make('rms', channels)"
)


def _nothing_found(model: nn.Module, readable: list[str]) -> str:
    if readable:
        return f"convert() found norms, but its rules select none: {listed(readable, 12)}. Change the rules or where="
    if seen := unreadable(model):
        named = "; ".join(f"{name or 'the model'}: {reason}" for name, reason in list(seen.items())[:6])
        return f"convert() found no norm that it can read: {named}. {OWN}"
    kinds = sorted({type(module).__name__ for module in model.modules()})
    named = listed(kinds, 12)
    return f"convert() found no norm: no class in this model has 'norm' in its name. Classes seen: {named}. {OWN}"
