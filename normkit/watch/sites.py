"""The norms of any model, the names that rows give them, the layout of their inputs, and padding."""

import inspect
import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from normkit._util import escape, truncate
from normkit.models.convert import is_parametrization
from normkit.models.masks import fit, is_time_first, real_tokens
from normkit.models.third_party import CannotRead, is_named_norm, read_norm
from normkit.norms import NORMS, Norm, StatNorm, options, parse

UNTRACKED = "(track_running_stats=False)"  # follows the class of a BatchNorm that keeps nothing for evaluation
NUMBERED = re.compile(r"((?:[^.]*\.)*?)(\d+)(|\..*)")  # the name of a site around its first part that is a number
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


def norm_class(norm: str) -> tuple[type[Norm] | None, dict[str, object]]:
    """The class (None if not normkit's) and the given options of a norm that rows name."""
    try:
        name, given = parse(norm)
    except (ValueError, TypeError):
        return None, {}
    return NORMS[name], given


def keeps_batch_statistics(norm: str) -> bool:
    """Return True if a norm, as rows name it, divides by statistics of batches.

    >>> [keeps_batch_statistics(norm) for norm in ("un(window=2)", "layer", "BatchNorm2d", "FrozenBatchNorm2d")]
    [True, False, True, False]
    """
    kind, _ = norm_class(norm)
    return "BatchNorm" in norm and "Frozen" not in norm if kind is None else issubclass(kind, StatNorm)


def freezes_quadratic_means(norm: str) -> bool:
    """Return True if the frozen batch statistics of a norm are quadratic means alone.

    >>> [freezes_quadratic_means(norm) for norm in ("un(window=2)", "batch", "BatchNorm2d", "layer")]
    [True, False, False, False]
    """
    kind, _ = norm_class(norm)
    return kind is not None and issubclass(kind, StatNorm) and not kind.center


def relies_on_batch(norm: str) -> bool:
    """Return True if a norm trains with each batch's own statistics, and freezes others.

    >>> [relies_on_batch(norm) for norm in ("batch", "pnv", "BatchNorm2d", "un", "layer")]
    [True, True, True, False, False]
    """
    return keeps_batch_statistics(norm) and not warms_up(norm) and UNTRACKED not in norm


def warms_up(norm: str) -> bool:
    """Return True if a norm starts with the statistics of each batch, for `warmup` steps."""
    kind, _ = norm_class(norm)
    return kind is not None and issubclass(kind, StatNorm) and "warmup" in options(parse(norm)[0])


def format_sites(sites: Iterable[str]) -> str:
    """List sites in few words: numbered neighbours as a range, at most six entries.

    >>> format_sites(["layers.4.norm1", "layers.5.norm1", "layers.6.norm1", "final_norm"])
    'layers.4-6.norm1, final_norm'
    """
    ranges: list[tuple[str, str, list[int]]] = []  # what is before and after the number, and the numbers
    plain: list[str] = []
    for site in map(escape, sites):
        if (match := NUMBERED.fullmatch(site)) is None:
            plain.append(site or "the model")
            continue
        head, number, tail = match[1], int(match[2]), match[3]
        neighbours = [known for h, t, known in ranges if (h, t, known[-1] + 1) == (head, tail, number)]
        if neighbours:
            neighbours[0].append(number)
        else:
            ranges.append((head, tail, [number]))
    shown = [f"{head}{n[0]}{tail}" if len(n) == 1 else f"{head}{n[0]}-{n[-1]}{tail}" for head, tail, n in ranges]
    return ", ".join(truncate([*shown, *plain]))
