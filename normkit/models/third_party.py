"""Read norms of third-party models by class name, and verify each reading by running it.

No third-party library is imported.
"""

import fnmatch
import inspect
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from normkit._util import format_spec
from normkit.kernels.sync import is_group
from normkit.models.hooks import copy_without_hooks
from normkit.norms import Norm, StatNorm, make, options, parse

LOOSE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
COMMON_EPS = (1e-5, 1e-6, 1e-12, 1e-8)  # tried if a class has eps in its forward, not in an attribute


@dataclass(frozen=True, eq=False, repr=False)
class Found:
    """Reading of a norm of a third-party model.

    Attributes:
        dim: Number of channels.
        eps: Number added to the variance or mean square.
        weight: Effective gain, `[dim]` or None. Gemma stores `weight - 1`.
        bias: Effective bias, `[dim]` or None.
        kind: Spec of the norm in normkit that computes the same.
        channel_dim: 1 if the channels come second, -1 if they come last.
        running: Frozen statistics, `[k, dim]`, or None.
        group: Process group over which it synchronizes statistics, or None.
        contiguous: True if its output is contiguous whatever the strides of its input, as of `nn.LayerNorm`.
    """

    dim: int
    eps: float
    weight: Tensor | None
    bias: Tensor | None
    kind: str
    channel_dim: int = -1
    running: Tensor | None = None
    group: Any = None
    contiguous: bool = False

    def __repr__(self) -> str:
        return f"Found({self.kind}, dim={self.dim}, eps={self.eps:g})"


class CannotRead(Exception):
    """Module that is no norm, or a norm that cannot be read; the message has the reason."""


def read_norm(module: nn.Module) -> Found:
    """Read what a norm computes; a CannotRead unless it is what its class name suggests."""
    if parametrize.is_parametrized(module):
        raise CannotRead("its parameters have parametrizations; remove them with torch.nn.utils.parametrize first")
    if isinstance(module, Norm):
        running = module.running if isinstance(module, StatNorm) else None
        group = sync if is_group(sync := getattr(module, "sync", False)) else None
        given = module.dim, module.eps, module.gains(), module.bias, module.spec, module.channel_dim, running
        return Found(*given, group, module.contiguous)
    name = type(module).__name__
    for known, (pattern, readers) in itertools.product(_names(module), READERS.items()):
        if fnmatch.fnmatchcase(known, pattern):
            if not all(type(child) is nn.Identity for child in module.children()):
                kinds = ", ".join(dict.fromkeys(type(child).__name__ for child in module.children()))
                raise CannotRead(f"{name} contains other modules ({kinds}); only a norm by itself can be read")
            return _first_that_agrees(module, readers)
    raise CannotRead(f"no reader for the class name {name}")


def _names(module: nn.Module) -> list[str]:
    """Names of a module's class and of those that it derives from."""
    return [kind.__name__ for kind in type(module).__mro__]


def is_named_norm(module: nn.Module) -> bool:
    """Return True if a class of it has "norm" in its name, and it contains no norm."""
    if not any("norm" in name.lower() for name in _names(module)):
        return False
    kept = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    bare = not any(module.children()) or parametrize.is_parametrized(module)
    return bare or any(not nn.parameter.is_lazy(t) and t.dim() == 1 for t in kept)


def equivalent(found: Found) -> Norm:
    """Build the equivalent norm of normkit, in evaluation mode, without shared memory."""
    name, given = parse(found.kind)
    affine = found.weight is not None or found.bias is not None
    given = {"affine": affine, "bias": found.bias is not None, **given, "eps": found.eps}
    norm = make(write(name, given), found.dim)
    tensors = [t for t in (found.weight, found.bias, found.running) if t is not None]
    norm = (norm.to(tensors[0].device, tensors[0].dtype) if tensors else norm).eval()
    with torch.no_grad():
        for mine, theirs in ((norm.weight, found.weight), (norm.bias, found.bias)):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)
        if isinstance(norm, StatNorm) and found.running is not None:
            norm.running.copy_(statistics(found.running, norm.center))
    return norm


def statistics(running: Tensor, center: bool) -> Tensor:
    """Convert statistics `[k, dim]` for norms with (k = 2) or without (k = 1) a mean.

    Mean and variance give the quadratic mean exactly. Conversely, the quadratic mean becomes a variance about zero,
    which divides by the same number.
    """
    if len(running) == 1 + center:
        return running
    if center:
        return torch.cat([torch.zeros_like(running), running])
    return (running[1] + running[0].square())[None]


def write(name: str, given: dict[str, object]) -> str:
    """Write the spec of a norm with these options."""
    given = {key: value for key, value in given.items() if key in options(name) and options(name)[key] != value}
    return format_spec(name, given)


def _first_that_agrees(module: nn.Module, readers: tuple[Callable[[Any], Found], ...]) -> Found:
    reasons, tensors = [], [*module.named_parameters(), *module.named_buffers()]
    if broken := [name for name, t in tensors if not t.is_meta and t.isnan().any()]:
        raise CannotRead(f"its {broken[0]} has NaN; load or compute it again")
    if further := [name for name in module._parameters if name not in ("weight", "bias")]:
        raise CannotRead(f"it has parameters beside weight and bias ({', '.join(further)})")
    taken = [each for each in inspect.signature(type(module).forward).parameters.values() if each.kind not in LOOSE]
    if more := [each.name for each in taken[2:]]:
        raise CannotRead(f"its forward takes further inputs ({', '.join(more)})")
    with real_tensors():
        probe = runnable(module)
        for reader in readers:
            try:
                return replace(reader(module), eps=_check(probe, reader(probe)))
            except CannotRead as error:
                reasons.append(str(error))
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {error}")
    differs = any(reason.startswith("read as") for reason in reasons)
    what = "computes something else than its name suggests" if differs else "cannot be read"
    raise CannotRead(f"{type(module).__name__} {what} ({'; '.join(dict.fromkeys(reasons))})")


@contextmanager
def real_tensors() -> Iterator[None]:
    """Make tensors with values, on the CPU, also where models are built without."""
    with _disable_current_modes(), torch.device("cpu"):
        yield


@torch.no_grad()
def runnable(module: nn.Module) -> nn.Module:
    """Return the module, or for one without values a copy on the CPU with random positive ones."""
    tensors = [*module.parameters(), *module.buffers()]
    if not any(t.is_meta for t in tensors):
        return module
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for t in tensors:
        made = (torch.rand(t.shape, generator=generator, dtype=torch.float32) + 0.5).to(t.dtype)
        memo[id(t)] = nn.Parameter(made, t.requires_grad) if isinstance(t, nn.Parameter) else made
    return copy_without_hooks(module, memo)


@torch.no_grad()
def _check(module: nn.Module, found: Found) -> float:
    """Return the eps with which the reading agrees; try common ones if it has none."""
    theirs = copy_without_hooks(module).float().eval()  # some compute in float32 whatever the type of their weights
    tried = COMMON_EPS if math.isnan(found.eps) else (found.eps,)
    for eps in tried:
        if _agrees(theirs, replace(found, eps=eps)):
            if _takes_any_size(theirs, found):
                raise CannotRead(f"it takes inputs of any size, not only of its own size {found.dim}")
            return eps
    without = f" with any eps of {', '.join(map(str, tried))}, and it has no attribute eps" if len(tried) > 1 else ""
    raise CannotRead(f"read as {found.kind}, its output differs{without}")


def _agrees(theirs: Any, found: Found) -> bool:
    """Compare module and reading on inputs of ordinary and tiny size, where eps matters."""
    mine = equivalent(found).float()
    if getattr(theirs, "eps", 0) is None:  # nn.RMSNorm then takes that of the type it computes in
        theirs.eps = found.eps
    x = example_of(theirs, found)
    for size in (1.0, 1e-2, 1e-4):
        y = theirs.forward((x * size).movedim(-1, found.channel_dim)).movedim(found.channel_dim, -1)
        if not torch.allclose(y.float(), mine(x * size), rtol=1e-4, atol=1e-5 * float(y.abs().max())):
            return False
    return True


def example_of(theirs: nn.Module, found: Found) -> Tensor:
    """Return a random input of a norm, with the channels last."""
    special = {"BatchNorm1d": 3, "BatchNorm3d": 5, "SqueezeBertLayerNorm": 3}
    usual = 3 if found.channel_dim == -1 else 4
    axes = next((special[name] for name in _names(theirs) if name in special), usual)
    shape = (2, *(2, 3, 2)[: axes - 2], found.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(_device(theirs))


def _takes_any_size(theirs: Any, found: Found) -> bool:
    """True where a module with weights ignores its own size, so that they are not used."""
    x = torch.ones(2, 2, found.dim + 1, dtype=torch.float32, device=_device(theirs)).movedim(-1, found.channel_dim)
    try:
        return found.dim > 1 and found.weight is not None and theirs.forward(x).shape == x.shape
    except Exception:
        return False


def _device(module: nn.Module) -> torch.device:
    return next((t.device for t in (*module.parameters(), *module.buffers())), torch.device("cpu"))


# -- one function per formula and place of its numbers ---------------------------------------------------------------


def read_eps(module: Any) -> float:
    """Read the eps of a norm; NaN if its forward has a constant."""
    names = (name for name in ("eps", "variance_epsilon", "epsilon") if hasattr(module, name))
    eps = getattr(module, next(names, ""), math.nan)
    wide = torch.float64 if any(p.dtype is torch.float64 for p in module.parameters()) else torch.float32
    return torch.finfo(wide).eps if eps is None else float(eps)  # nn.RMSNorm computes in float32 at least


def _dim(module: Any) -> int:
    shape, weight = getattr(module, "normalized_shape", None), getattr(module, "weight", None)
    if shape is None and weight is None and isinstance(getattr(module, "dim", None), tuple):  # diffusers' RMSNorm
        shape = module.dim
    if shape is not None and not isinstance(shape, int):
        if len(shape) != 1:
            raise CannotRead(f"it normalizes over {len(shape)} axes, {tuple(shape)}; only the last can be converted")
        return int(shape[0])
    if weight is None:
        raise CannotRead("it has no weight; set its normalized_shape = (channels,)")
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        raise CannotRead("it has no weight with one number a channel")
    return weight.numel()


def _affine(module: Any, kind: str, channel_dim: int = -1, unit_offset: bool = False) -> Found:
    """Read a per-token norm; with `unit_offset` it stores its gain minus 1."""
    dim, weight, bias = _dim(module), getattr(module, "weight", None), getattr(module, "bias", None)
    if unit_offset:
        weight = nn.Parameter(1 + module.weight.detach(), module.weight.requires_grad)
    contiguous = is_contiguous(module) and channel_dim == -1
    return Found(dim, read_eps(module), weight, bias, kind, channel_dim, contiguous=contiguous)


def is_contiguous(module: nn.Module) -> bool:
    """Return True for a norm whose output PyTorch makes contiguous, so that a `view` may follow."""
    return isinstance(module, nn.LayerNorm | nn.RMSNorm)


def _batch(module: Any) -> Found:
    if module.running_mean is None:
        raise CannotRead("BatchNorm without running statistics normalizes by the batch at inference too")
    running = torch.stack([module.running_mean, module.running_var])
    momentum = getattr(module, "momentum", None)
    given: dict[str, object] = {"sync": type(module).__name__ == "SyncBatchNorm"}
    if momentum is not None:  # None, an average over all: alpha=0.9; 0, frozen statistics: as good as 1
        given["alpha"] = min(round(1 - momentum, 12), 1 - 1e-12)
    group = getattr(module, "process_group", None)
    numbers = running.shape[1], read_eps(module), module.weight, module.bias, write("batch", given), 1, running
    return Found(*numbers, group)


def _group(module: Any) -> Found:
    kind = f"group(groups={module.num_groups}, over='sample')"
    return Found(module.num_channels, module.eps, module.weight, module.bias, kind, channel_dim=1)


LAYER, RMS = partial(_affine, kind="layer"), partial(_affine, kind="rms")
LAYER_2D, RMS_2D = partial(LAYER, channel_dim=1), partial(RMS, channel_dim=1)
READERS: dict[str, tuple[Callable[[Any], Found], ...]] = {  # by class name; the first reading that agrees is used
    "*LayerNorm1P": (partial(LAYER, unit_offset=True),),  # Nemotron keeps weight - 1
    "LayerNorm*": (LAYER, LAYER_2D),  # torch, torchvision, timm
    "*LayerNorm": (LAYER, RMS, LAYER_2D),  # T5LayerNorm is an RMSNorm, ConvNextLayerNorm has two layouts
    "*RMSNorm": (RMS, partial(RMS, unit_offset=True)),  # torch, Llama, Mistral, Qwen; Gemma keeps weight - 1
    "RmsNorm*": (RMS, RMS_2D),  # timm
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "BatchNormAct2d"), (_batch,)),
    "*FrozenBatchNorm*2d": (_batch,),  # torchvision, timm, DETR; gain and bias are buffers, and stay frozen
    **dict.fromkeys(("*GroupNorm", "GroupNorm1*", "GroupNormAct"), (_group,)),  # torch, PoolFormer, timm
}
