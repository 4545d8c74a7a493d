"""Two models compared in float64: on the given example, and on random inputs of the same and of other shapes."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from normkit.transforms.calls import tensors

NARROW = (torch.float32, torch.float16, torch.bfloat16)
NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)


class Double(TorchFunctionMode):
    """Compute in float64 where a model asks for less, as norms and softmaxes of language models do for half inputs."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """The call with float64 in place of narrower types."""
        if func in NARROWING:
            return args[0].double()
        kwargs = {key: _wide(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wide, args), **kwargs)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Float64 everywhere, and no fused kernels that hide what a layer computes."""
    default, fused = torch.get_default_dtype(), torch.backends.mha.get_fastpath_enabled()
    torch.set_default_dtype(torch.float64)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with Double(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(default)
        torch.backends.mha.set_fastpath_enabled(fused)


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value


def widened(example: Any) -> Any:
    """An example with its floating-point tensors in float64."""
    leaves, spec = tree_flatten(example)
    return tree_unflatten(
        [t.double() if isinstance(t, Tensor) and t.dtype.is_floating_point else t for t in leaves], spec
    )


@torch.no_grad()
def error(mine: Any, theirs: Any, outputs: Callable[[Any], Any] | None = None) -> float:
    """The largest difference between two outputs, relative to each tensor's largest number; inf where kinds differ.

    >>> error(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 2.0]))
    1.0
    """
    mine, theirs = (tensors(outputs(out) if outputs else out) for out in (mine, theirs))
    if mine.keys() != theirs.keys() or not mine:
        return float("inf")
    return max(_difference(mine[path], theirs[path]) for path in mine)


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    if not a.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else float("inf")
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a[finite].double(), b[finite].double()
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)) if a.numel() else 0.0


def variants(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], other_shapes: bool = True
) -> dict[str, tuple[tuple, dict[str, Any]]]:
    """Random inputs made after an example, by label: same shapes, one more in the batch, other lengths and sizes.

    Without `other_shapes` lengths and sizes stay. Masks, flags and whatever is no tensor stay what they are. Those that
    the model itself refuses are left out.
    """
    leaves, spec = tree_flatten((args, kwargs))
    given = [t for t in leaves if isinstance(t, Tensor) and t.dim() > 0]
    plans: dict[str, Callable[[Tensor], Tensor]] = {"the same shapes": lambda t: t}
    sizes = [t.shape[0] for t in given]
    if sizes:
        batch = max(set(sizes), key=sizes.count)
        plans["a larger batch"] = lambda t: _resized(t, 0, batch, batch + 1)
    for length in dict.fromkeys(t.shape[1] for t in given if other_shapes and _is_sequence(t)):
        if length > 2:
            plans[f"{length - 1} tokens"] = lambda t, length=length: _relength(t, length, length - 1)
    for height, width in dict.fromkeys(tuple(t.shape[2:]) for t in given if other_shapes and _is_image(t)):
        for part in (2, 4):
            new = height + height // part, width + width // part
            label = f"{new[0]} pixels" if height == width else f"{new[0]} x {new[1]} pixels"
            plans[label] = lambda t, new=new: _repixel(t, *new)
    found = {}
    for seed, (label, change) in enumerate(plans.items()):
        generator = torch.Generator().manual_seed(seed)
        new = [_random(change(t) if t.dim() else t, generator) if isinstance(t, Tensor) else t for t in leaves]
        call = tree_unflatten(new, spec)
        with contextlib.suppress(Exception):
            model(*call[0], **call[1])
            found[label] = call
    return found


def _is_sequence(t: Tensor) -> bool:
    return (t.dim() == 2 and not t.dtype.is_floating_point) or (t.dim() == 3 and t.dtype.is_floating_point)


def _is_image(t: Tensor) -> bool:
    if t.dim() != 4 or not t.dtype.is_floating_point or _is_flags(t):
        return False
    return min(t.shape[2:]) > 3 and t.shape[1] not in t.shape[2:]


def _resized(t: Tensor, dim: int, old: int, new: int) -> Tensor:
    return t.index_select(dim, torch.arange(new, device=t.device) % old) if t.shape[dim] == old else t


def _relength(t: Tensor, old: int, new: int) -> Tensor:
    dims = (1,) if t.dim() == 3 and t.dtype.is_floating_point and not _is_flags(t) else range(1, t.dim())
    for dim in dims:
        t = _resized(t, dim, old, new)
    return t


def _repixel(t: Tensor, height: int, width: int) -> Tensor:
    return _resized(_resized(t, 2, t.shape[2], height), 3, t.shape[3], width) if _is_image(t) else t


def _is_flags(t: Tensor) -> bool:
    """Masks: true and false, 0 and 1, or numbers so low that they stand for minus infinity."""
    return t.dtype is torch.bool or bool(((t == 0) | (t == 1) | (t < -1e4)).all())


def _random(t: Tensor, generator: torch.Generator) -> Tensor:
    if t.dtype.is_floating_point and t.numel() == 1:  # a factor, say
        return t * (1 + torch.rand((), generator=generator, dtype=torch.float64)).to(t) + 0.5
    if _is_flags(t):
        return t
    if t.dtype.is_floating_point:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        return (noise.to(t.device) * t.double().std(correction=0) + t.double().mean()).to(t.dtype)
    low, high = int(t.min()), int(t.max())
    return torch.randint(low, high + 1, t.shape, generator=generator).to(t.device, t.dtype)
