"""Check that a model can be transformed, and copy it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_leaves

from normkit._util import listed, require_flags, warn
from normkit.models.hooks import share_groups
from normkit.models.lazy import is_large, widened
from normkit.norms import StatNorm
from normkit.norms._warmup import WarmupNorm

WRAPPERS = {  # class name: what to do instead
    "DistributedDataParallel": "transform `model.module` and wrap the result",
    "DataParallel": "transform `model.module` and wrap the result",
    "FullyShardedDataParallel": "transform the model before it is sharded",
    "FSDPModule": "transform the model before fully_shard()",
    "OptimizedModule": "transform the original (`model._orig_mod`) and compile the result",
    "ScriptModule": "transform the eager model; TorchScript has no modules to swap",
    "GraphModule": "transform the model that it was traced from",
}
QUANTIZED = ("torch.ao.nn.quantized", "torchao", "bitsandbytes", "auto_gptq", "awq", "hqq", "optimum.quanto")


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Let the ImportError of a package name the extra of normkit that installs it."""
    try:
        yield
    except ImportError as missing:
        raise ImportError(f"{what} needs {missing.name}; pip install 'normkit[{extra}]'") from missing


def check_is_model(model: object, verb: str) -> None:
    """Raise a TypeError for what is no model."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{verb}() takes an nn.Module; got {type(model).__name__}")


def check_not_wrapped(model: nn.Module, verb: str) -> None:
    """Raise a TypeError for what is no model, or is wrapped, sharded or compiled."""
    check_is_model(model, verb)
    for name, module in model.named_modules():
        for kind in type(module).__mro__:
            if kind.__name__ in WRAPPERS:
                wrapped = f"{name or 'the model'} is wrapped in {kind.__name__}; {WRAPPERS[kind.__name__]}"
                raise TypeError(f"{verb}() cannot transform this model: {wrapped}")
        compiled = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
        if compiled or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(f"{verb}() cannot transform this model: {name or 'it'} is compiled; compile after {verb}()")
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "DTensor":
            raise TypeError(f"{verb}() cannot transform this model: {name} is sharded; transform it before sharding")


def check_not_quantized(model: nn.Module, verb: str) -> None:
    """Raise a TypeError for a model with quantized weights."""
    found = []
    for name, part in [*model.named_modules(), *model.named_parameters()]:
        if type(part).__module__.startswith(QUANTIZED) or hasattr(part, "_packed_params"):
            found.append(f"{name or 'the model'} is a quantized {type(part).__name__}")
        elif isinstance(part, Tensor) and not (part.dtype.is_floating_point or part.dtype.is_complex):
            found.append(f"{name} is stored as {part.dtype}")
    if found:
        raise TypeError(f"{verb}() cannot change this model: {found[0]}. Transform the model first, then quantize it")


def check_not_meta(model: nn.Module, verb: str) -> None:
    """Raise a ValueError for tensors without values, on the meta device or of lazy modules."""
    named = [*model.named_parameters(), *model.named_buffers()]
    names = [name for name, t in named if t.is_meta or is_lazy(t)]
    if names and any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(
            f"{verb}() reads the model, and accelerate keeps {len(names)} of its tensors elsewhere ({names[0]}), "
            "such as on disk. Load the model whole, with device_map='cpu' and without offload_folder"
        )
    if names:
        raise ValueError(
            f"{verb}() reads the model, and {len(names)} of its tensors have no values ({names[0]}). Call a lazy model "
            "once first; load the weights of a model on meta: model.load_state_dict(state, assign=True)"
        )


def check_not_training(model: nn.Module, verb: str) -> None:
    """Raise a ValueError unless every module is in evaluation mode."""
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        where = "the model" if "" in training else training[0]
        raise ValueError(f"{verb}() is for inference, and {where} is in training mode; call model.eval() first")


def norms_with_statistics(model: nn.Module, verb: str) -> dict[str, StatNorm]:
    """Return the norms with running statistics by name; a ValueError if there are none."""
    norms = {name: module for name, module in model.named_modules() if isinstance(module, StatNorm)}
    if not norms:
        raise ValueError(
            f"{verb}() found no norm of normkit with running statistics; nk.convert(model, 'batch') keeps those of "
            "PyTorch's BatchNorm, and other norms become 'un' by nk.convert and training"
        )
    return norms


def warn_untrained(model: nn.Module, verb: str) -> None:
    """Warn of norms whose running statistics are initial, or from a warm-up that has not ended.

    The outputs are then those of the model as it is, whatever model it was converted from. Statistics that were
    calibrated or loaded are taken as they are.
    """
    initial, warming = [], []
    for name, norm in model.named_modules():
        if not isinstance(norm, StatNorm):
            continue
        end = norm.end_of_warmup(norm) if isinstance(norm, WarmupNorm) else getattr(norm, "warmup", 0)
        if not norm.step and (norm.running[-1] == 1).all() and not norm.running[:-1].any():
            initial.append(name)
        elif not norm.was_set and norm.step < end:
            warming.append(name)
    for names, state in ((initial, "have never seen a training step"), (warming, "are still in their warm-up")):
        if names:
            remedy = "train longer, or call calibrate(model, batches), with like= for the model that it came from"
            message = f"{verb}() takes running statistics of norms that {state} ({listed(names, 3)}): {remedy}"
            warn(message)


def copy_unless(inplace: bool, model: nn.Module) -> nn.Module:
    """Return the model itself if `inplace`, else a copy."""
    require_flags(inplace=inplace)
    return model if inplace else copy_model(model)


def copy_model(model: nn.Module, wide: bool = False, share: bool = False, share_all: bool = False) -> nn.Module:
    """Copy a model.

    Args:
        model: The model.
        wide: Copy tensors that are no parameters or buffers in float64. Large parameters are not copied: they become
            lazy ones that read the originals, in float64.
        share: Let the copy have the parameters that the model's forward does not change.
        share_all: Let the copy have all parameters and buffers.
    """
    known = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    leaves = tree_leaves([vars(module) for module in model.modules()])
    plain = {id(t): t for t in leaves if isinstance(t, Tensor) and id(t) not in known}
    memo = {key: t.detach().clone() for key, t in plain.items() if not t.is_leaf}  # weight norm computes them again
    kept = {id(p): p for module in model.modules() for p in _read_only(module)} if share or wide else {}
    if share:
        memo |= kept
    if wide:
        memo |= {key: t.detach().clone().double() for key, t in plain.items() if t.is_floating_point()}
        memo |= {key: widened(p) for key, p in kept.items() if is_large(p)}
    return copy.deepcopy(model, memo | share_groups(model) | (known if share_all else {}))


def _read_only(module: nn.Module) -> list[Tensor]:
    """The parameters of a module that its forward does not change."""
    changes = isinstance(module, ParametrizationList) or getattr(module, "max_norm", None) is not None
    return [] if changes else [p for p in module._parameters.values() if p is not None]
