"""Record in a model's configuration how it differs from its architecture, and rebuild it.

For models of Hugging Face. Every writer of a checkpoint saves `config.json`, `Trainer` included, so the specs of the
norms are kept there, in the key "normkit".
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations, type_before_parametrizations

from normkit.models.affine import Affine
from normkit.models.fastpath import leave_fast_path
from normkit.models.first_token import Clamp, put_first_token
from normkit.models.hooks import channels_first
from normkit.models.masks import mask_arguments, route_mask
from normkit.models.take_apart import take_norms_apart
from normkit.models.third_party import is_contiguous
from normkit.norms import NORMS, Norm, make
from normkit.norms.power import GroupRMS

KEY = "normkit"  # in config.json


def record_changes(model: nn.Module) -> None:
    """Write the changes of a Hugging Face model into `model.config`; ignore other models.

    A model that holds modules of other libraries in changed places (adapters, say) is recorded by
    `save_pretrained` alone, which names them.
    """
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return
    try:
        write_changes(model)
    except Exception:  # a class that cannot be built from its configuration alone
        vars(model.config).pop(KEY, None)  # of other changes


def write_changes(model: Any) -> dict[str, Any]:
    """Write the changes of a model into its configuration, and return them."""
    changes = find_changes(model)
    if any(changes.values()):
        setattr(model.config, KEY, changes)
    elif hasattr(model.config, KEY):
        delattr(model.config, KEY)
    return changes if any(changes.values()) else {}


def find_changes(model: Any) -> dict[str, Any]:
    """Find norms, biases, buffers, parametrizations and ties that are not the architecture's."""
    with torch.device("meta"):
        fresh = type(model)(copy.deepcopy(model.config))
    norms: dict[str, Any] = {}
    buffers: list[str] = []  # that the architecture computes, such as positions, and that folding changed
    biases, plain = dict[str, int](), list[str]()
    masks, modules = mask_arguments(model), dict(model.named_modules(remove_duplicate=False))
    apart = take_norms_apart(fresh, modules)
    for name, there in fresh.named_modules():
        if name not in modules or any(name.startswith(f"{norm}.") for norm in norms):
            continue
        here = modules[name]
        replaced = name in apart or type_before_parametrizations(here) is not type_before_parametrizations(there)
        lost = [key for key, p in there._parameters.items() if p is not None and here._parameters.get(key, p) is None]
        if replaced or (isinstance(here, nn.LayerNorm | nn.RMSNorm) and lost):
            norms[name] = _describe(name, here) | ({"mask": masks[name]} if name in masks else {})
            continue
        if is_parametrized(there) and not is_parametrized(here):
            plain.append(name)
        buffers += [f"{name}.{k}" for k in sorted(there._non_persistent_buffers_set - here._non_persistent_buffers_set)]
        for key, value in here._parameters.items():
            if value is not None and there._parameters.get(key) is None and name not in plain:
                biases[f"{name}.{key}"] = value.numel()
    first = getattr(getattr(model, "base_model", model), "first_keys", None)
    return {
        "norms": norms, "biases": biases, "buffers": buffers, "plain": plain, "untied": _untied(model, fresh),
        **({} if first is None else {"first": list(first.shape)}),
    }  # fmt: skip


def rebuild(model: Any, changes: Mapping[str, Any]) -> None:
    """Rebuild recorded changes in a model of the architecture, in place, without weights."""
    try:
        prefix = getattr(model, "base_model_prefix", "")
        take_norms_apart(model, {each for name in changes["norms"] for each in (name, f"{prefix}.{name}")})
        apply_changes(model, changes, _build_norm)
        masks = {full_name(model, name): norm["mask"] for name, norm in changes["norms"].items() if "mask" in norm}
    except (AttributeError, KeyError, TypeError, ValueError) as problem:
        own = "; a norm of your own has to be imported first (--import FILE)" if "no norm named" in str(problem) else ""
        raise ValueError(f"the key {KEY!r} of its configuration cannot be read: {problem}{own}") from problem
    leave_fast_path(model)
    if masks:
        route_mask(model, masks)


def apply_changes(model: Any, changes: Any, build_norm: Any = None) -> None:
    """Make recorded changes in a model, without weights; `build_norm` builds norms of normkit."""
    for name, change in changes["norms"].items():
        full = full_name(model, name)
        model.set_submodule(full, build(change, model.get_submodule(full), build_norm))
        model.get_submodule(full)._is_hf_initialized = True  # else transformers resets it by the name of its class
    for name, length in changes["biases"].items():
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(full_name(model, owner)), key, nn.Parameter(torch.zeros(length)))
    for name in changes["buffers"]:
        owner, _, key = name.rpartition(".")
        save_buffer(model.get_submodule(full_name(model, owner)), key)
    for name in changes["plain"]:
        module = model.get_submodule(full_name(model, name))
        for key in list(module.parametrizations):
            remove_parametrizations(module, key)
    if "first" in changes:
        put_first_token(model, torch.zeros(changes["first"]), torch.zeros(changes["first"]))
    for name in changes["untied"]:
        module = model.get_submodule(full_name(model, name))
        module.weight = nn.Parameter(torch.empty_like(module.weight))
        getattr(model, "all_tied_weights_keys", {}).pop(f"{name}.weight", None)


def full_name(model: Any, name: str) -> str:
    """Return a module's full name; `convert(model.bert)` records names inside `model.bert`."""
    inner = f"{getattr(model, 'base_model_prefix', '')}.{name}"
    names = {each for each, _ in model.named_modules()}
    return inner if name not in names and inner in names else name


def build(change: Any, old: nn.Module, build_norm: Any) -> nn.Module:
    """Build what stands in the place of a norm."""
    kind, dim = change["is"], change.get("dim")
    if kind == "clamped norm":
        return nn.Sequential(Clamp(dim), build(change["then"], old, build_norm))
    if kind == "clamped":
        return nn.Sequential(old, Clamp(dim))
    if kind == "affine":
        weight, bias = (torch.ones(dim) if change[key] else None for key in ("weight", "bias"))
        return Affine(weight, bias, change["channel_dim"])
    if kind in ("LayerNorm", "RMSNorm"):
        options = {"bias": change["bias"]} if kind == "LayerNorm" else {}
        return getattr(nn, kind)(dim, change["eps"], elementwise_affine=change["weight"], **options)
    if kind != "identity":
        return build_norm(change, old)
    identity = nn.Identity()
    if "weight" in change:  # of which the model reads the type
        identity.register_buffer("weight", torch.empty(0), persistent=False)
    return identity


def _build_norm(change: Mapping[str, Any], old: nn.Module) -> nn.Module:
    if change["is"] == "layer-scale":
        return GroupRMS(change["groups"], change["eps"])
    norm = make(change["is"], change["dim"])
    norm.contiguous = is_contiguous(old) and change["channel_dim"] == -1
    return channels_first(norm) if change["channel_dim"] == 1 else norm


def save_buffer(module: nn.Module, key: str) -> None:
    """Make a buffer part of the state, as it no longer has the constructor's values."""
    module._non_persistent_buffers_set.discard(key)
    if isinstance(buffer := module._buffers.get(key), nn.Buffer):
        buffer.persistent = True  # a forward that assigns it registers it again


def _describe(name: str, module: nn.Module) -> dict[str, Any]:
    affine = {key: getattr(module, key, None) is not None for key in ("weight", "bias")}
    first, last = (module[0], module[-1]) if isinstance(module, nn.Sequential) and len(module) else (None, None)
    if isinstance(module, nn.Sequential) and isinstance(first, Clamp):
        return {"is": "clamped norm", "dim": len(first.low), "then": _describe(name, module[1])}
    if isinstance(last, Clamp):
        return {"is": "clamped", "dim": len(last.low)}
    if isinstance(module, nn.Identity):
        return {"is": "identity"} | ({"weight": True} if affine["weight"] else {})
    if isinstance(module, Affine):
        width = next(p.numel() for p in module.parameters())
        return {"is": "affine", **affine, "dim": width, "channel_dim": module.channel_dim}
    kind = type_before_parametrizations(module)  # a class derived from a norm may compute something else
    if isinstance(module, Norm) and kind in NORMS.values():
        return {"is": module.spec, "dim": module.dim, "channel_dim": module.channel_dim}
    if isinstance(module, GroupRMS):
        return {"is": "layer-scale", "groups": module.groups, "eps": module.eps}
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and kind in (nn.LayerNorm, nn.RMSNorm):
        return {"is": kind.__name__, **affine, "dim": module.normalized_shape[0], "eps": module.eps}
    raise ValueError(
        f"{name} is a {kind.__name__}, which its architecture does not have there and normkit cannot rebuild. "
        "Save the model with the library that put it there; your own norm can be a row of NORMS"
    )


def _ties(model: nn.Module) -> list[set[str]]:
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [group for group in names.values() if len(group) > 1]


def _untied(model: Any, fresh: nn.Module) -> list[str]:
    """Return modules whose weight is tied in the architecture, but not in this model."""
    mine = _ties(model)
    apart = {name for group in _ties(fresh) for name in group if not any(name in other for other in mine)}
    embeddings = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    owners = {name.removesuffix(".weight") for name in apart if name.endswith(".weight")}
    return sorted(owners - embeddings)
