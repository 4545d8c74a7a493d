"""The norms of any model, the names that rows give them, the layout of their inputs, and padding."""

import inspect
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from normkit.models.convert import is_parametrization
from normkit.models.masks import fit, is_time_first, real_tokens
from normkit.models.third_party import CannotRead, is_named_norm, read_norm
from normkit.norms import NORMS, Norm, StatNorm, options, parse

UNTRACKED = "(track_running_stats=False)"  # follows the class of a BatchNorm that keeps nothing for evaluation
WRAPPERS = ("DistributedDataParallel", "DataParallel")


@dataclass(eq=False)
class Site:
    """A norm of a model: its name there, its spec or class, axes of channels and sequences."""

    name: str
    norm: str
    module: nn.Module
    axis: int = -1
    offset: float = 0.0  # gain less weight: 1 for Gemma
    batch_axis: int = 0

    @property
    def stateful(self) -> bool:
        """True if the norm keeps running statistics; frozen ones never follow the batches."""
        return isinstance(self.module, StatNorm) or ("Frozen" not in self.norm and _has_running_statistics(self.module))

    @property
    def weight(self) -> Tensor | None:
        """The learned scale, one number a channel or one for all."""
        weight = getattr(self.module, "weight", None)
        return weight.detach() + self.offset if isinstance(weight, Tensor) and weight.dim() == 1 else None

    @property
    def eps(self) -> float:
        """The term added to a variance before its root is taken."""
        eps = getattr(self.module, "eps", getattr(self.module, "variance_epsilon", None))
        return float(eps) if isinstance(eps, float | int) else 1e-5

    def running(self) -> dict[str, Tensor]:
        """A copy of the norm's running statistics `[C]`; empty for a per-token norm."""
        module: Any = self.module
        if isinstance(module, StatNorm):
            names = ("running_mean", "running_var") if module.center else ("running_quadratic",)
            return dict(zip(names, module.running.clone(), strict=True))
        return {name: getattr(module, name).clone() for name in ("running_mean", "running_var") if self.stateful}

    def can_measure(self, x: object) -> TypeGuard[Tensor]:
        """Return True for real numbers in the norm's channels."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return False
        kept = [t for t in (self.weight, *self.running().values()) if t is not None]
        return -x.dim() <= self.axis < x.dim() and all(len(t) in (1, x.shape[self.axis]) for t in kept)

    def channels_last(self, x: Tensor) -> Tensor:
        """Move the channels of an input or output of the norm to the last axis."""
        return x if self.axis == -1 else x.movedim(self.axis, -1)


def sites(model: nn.Module) -> list[Site]:
    """The norms of a model, normkit's and others', in its order.

    Norms of weights, such as FixNorm, are left out.

    >>> [(site.name, site.norm) for site in sites(nn.Sequential(nn.BatchNorm2d(3), nn.LayerNorm(3)))]
    [('0', 'BatchNorm2d'), ('1', 'LayerNorm')]
    """
    found, batch = [], int(is_time_first(model))
    for name, module in model.named_modules():
        if isinstance(module, Norm):  # hooks that move channels are outside
            found.append(Site(_unwrapped_name(name, model), module.spec, module, batch_axis=batch))
        elif not is_parametrization(name) and (is_named_norm(module) or _has_running_statistics(module)):
            norm = type(module).__name__
            norm += UNTRACKED if "BatchNorm" in norm and getattr(module, "running_var", 0) is None else ""
            found.append(Site(_unwrapped_name(name, model), norm, module, *_layout(module), batch))
    return found


def _unwrapped_name(name: str, model: nn.Module) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    return ".".join(parts[1:] if type(model).__name__ in WRAPPERS and parts[0] == "module" else parts)


def _layout(module: nn.Module) -> tuple[int, float]:
    try:
        found = read_norm(module)
        return found.channel_dim, float(found.weight is not getattr(module, "weight", None))
    except CannotRead:  # a norm of images, or one with a formula of its own
        first = type(module).__name__.endswith(("2d", "3d", "ResponseNorm"))
        return 1 if first or _has_running_statistics(module) else -1, 0.0


def _has_running_statistics(module: nn.Module) -> bool:
    return isinstance(getattr(module, "running_var", None), Tensor)


class Padding:
    """Finds padding by the `padding_idx` of embeddings and by masks among arguments.

    Embeddings come first, the last one whose shape fits; then arguments named `attention_mask` or `...padding_mask`.
    """

    def __init__(self, model: nn.Module):
        inner: Any = model  # wrappers take any arguments
        while type(inner).__name__ in (*WRAPPERS, "OptimizedModule"):
            inner = inner._orig_mod if hasattr(inner, "_orig_mod") else inner.module
        self.names, self.time_first = list(inspect.signature(inner.forward).parameters), is_time_first(model)
        self.real = deque[Tensor](maxlen=64)  # of this step, the first to try last; evaluation has no steps
        self.handles = [
            module.register_forward_pre_hook(self._embed)
            for module in model.modules()
            if isinstance(module, nn.Embedding) and module.padding_idx is not None
        ]

    def take_masks(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep the masks among the arguments of the model."""
        given = {**dict(zip(self.names, args, strict=False)), **kwargs}
        for name, value in reversed(given.items()):
            if name.endswith(("attention_mask", "padding_mask")) and isinstance(value, Tensor) and value.dim() > 1:
                self.real.append(real_tokens(value, name))

    def mask(self, shape: torch.Size) -> Tensor | None:
        """Return True for real tokens of an input of this shape `[...]`; None without any mask."""
        for real in reversed(self.real):
            for time_first in (self.time_first, not self.time_first):
                if (mask := fit(real, shape, time_first)) is not None:
                    return mask
        return None

    def _embed(self, module: nn.Embedding, args: tuple) -> None:
        if not torch.compiler.is_compiling() and args and args[0].dim() == 2:
            self.real.append(args[0] != module.padding_idx)


class Traits(NamedTuple):
    """What follows from the name of a norm in rows."""

    kind: type[Norm] | None = None  # its class in normkit
    options: Mapping[str, object] = {}
    batch: bool = False  # it divides by statistics of batches
    tracks: bool = True  # it freezes statistics for evaluation
    quadratic: bool = False  # those are quadratic means alone
    warms_up: bool = False  # it starts with the statistics of each batch

    @property
    def relies_on_batch(self) -> bool:
        """It trains with each batch's own statistics, and freezes others."""
        return self.batch and self.tracks and not self.warms_up


def traits(norm: str) -> Traits:
    """Return what follows from the name of a norm in rows.

    >>> traits("un(window=2)").quadratic, traits("BatchNorm2d").batch, traits("layer").batch
    (True, True, False)
    """
    try:
        name, given = parse(norm)
    except (ValueError, TypeError):
        return Traits(batch="BatchNorm" in norm and "Frozen" not in norm, tracks=UNTRACKED not in norm)
    kind = NORMS[name]
    if not issubclass(kind, StatNorm):
        return Traits(kind, given)
    return Traits(kind, given, batch=True, quadratic=not kind.center, warms_up="warmup" in options(name))
