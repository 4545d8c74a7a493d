"""Two models compared in float64: on the given example, and on random inputs of the same and of other shapes."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from normkit.transforms.invoke import tensors

NARROW = (torch.float32, torch.float16, torch.bfloat16)
SAME_SIZES = ("the example", "the same shapes", "a larger batch", "masks that mask")  # labels of calls
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


@dataclass(frozen=True)
class Change:
    """Other sizes for some axes of one input, and for whatever goes along with it."""

    like: Tensor
    sizes: dict[int, int]  # axis: its new size

    def of(self, t: Tensor, is_data: bool) -> Tensor:
        """Data of as many axes change theirs; a mask changes each axis that is as long, the batch's apart."""
        if is_data and t.dim() == self.like.dim():
            changes = [(axis, self.like.shape[axis], new) for axis, new in self.sizes.items()]
        else:
            first = int(t.dim() > 0 and t.shape[0] == self.like.shape[0])
            changes = [(axis, self.like.shape[a], n) for axis in range(first, t.dim()) for a, n in self.sizes.items()]
        for axis, old, new in changes:
            t = _resized(t, axis, old, new)
        return t


Tries = dict[str, Callable[[Tensor, bool], Tensor]]  # by label: how an input, data or not, is changed


def variants(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], other_shapes: bool = True
) -> dict[str, tuple[tuple, dict[str, Any]]]:
    """Random inputs made after an example, by label: same shapes, one more in the batch, masks that mask, other sizes.

    Without `other_shapes` lengths and sizes stay. Masks and flags stay what they are, but those that are the same all
    over are also tried with something to mask; whatever is no tensor stays. Those that the model itself refuses are
    left out.
    """
    leaves, spec = tree_flatten((args, kwargs))
    given = [t for t in leaves if isinstance(t, Tensor) and t.dim() > 0]
    data = [t for t in given if not _is_flags(t)] or [t for t in given[:1] if t.dtype is not torch.bool]
    of_data = {id(t) for t in data}
    plans: list[Tries] = [{"the same shapes": lambda t, is_data: t}]
    if given:
        sizes = [t.shape[0] for t in given]
        batch = max(set(sizes), key=sizes.count)
        plans.append({"a larger batch": lambda t, is_data: _resized(t, 0, batch, batch + 1)})
    if any(_is_idle(t) for t in given if id(t) not in of_data):
        plans.append({"masks that mask": lambda t, is_data: t if is_data else _masking(t)})
    if other_shapes:
        plans += [plan for t in data for plan in _other_sizes(t)]
    found: dict[str, tuple[tuple, dict[str, Any]]] = {}
    for seed, plan in enumerate(plans):
        for (label, change), top in itertools.product(plan.items(), _tops(model, data)):
            if label in found:
                break
            generator = torch.Generator().manual_seed(seed)
            new = [_drawn(t, id(t) in of_data, change, generator, top) if isinstance(t, Tensor) else t for t in leaves]
            call = tree_unflatten(new, spec)
            with contextlib.suppress(Exception):
                model(*call[0], **call[1])
                found[label] = call
                break
    return found


def _other_sizes(t: Tensor) -> Iterator[Tries]:
    """What may be a length or a size, with others in its place; of each plan the first that the model does not refuse.

    A length less one, or less a fifth. For pictures a quarter and a half more, and a little more: as little as patches
    allow, so that windows of patches have to be filled up.
    """
    numbers = t.dtype.is_floating_point
    for axis in range(1, min(t.dim(), 2 + numbers)) if t.dim() < 4 else ():
        old = t.shape[axis]
        shorter = {old - 1, old - old // 5} if t.dim() == 2 and numbers else {old - 1}  # sound: by more than a frame
        for new in sorted(shorter - {old}, reverse=True) if old > 2 else ():
            yield {f"{new} tokens" if axis == 1 else f"length {new}": Change(t, {axis: new}).of}
    if t.dim() not in (4, 5) or not numbers:
        return
    last: Tries = {}
    for axes in (range(2, t.dim()), range(1, t.dim() - 1)):  # channels first, channels last
        old = [t.shape[axis] for axis in axes]
        if min(old) > 3:
            yield dict([_pixels(t, axes, [n + n // 2 for n in old])])
            yield dict([_pixels(t, axes, [n + n // 4 for n in old])])
            yield dict([_pixels(t, axes, [n + 1 for n in old])])
            last |= dict(_pixels(t, axes, [n + more for n in old]) for more in (4, 8, 16, 32))
    last |= {f"size {n - 1} of axis {a}": Change(t, {a: n - 1}).of for a, n in enumerate(t.shape) if a and n > 2}
    yield last


def _pixels(t: Tensor, axes: Sequence[int], new: list[int]) -> tuple[str, Callable[[Tensor, bool], Tensor]]:
    label = str(new[0]) if len(set(new)) == 1 else " x ".join(map(str, new))
    return f"{label} pixels", Change(t, dict(zip(axes, new, strict=True))).of


def _resized(t: Tensor, dim: int, old: int, new: int) -> Tensor:
    if t.dim() == 0 or t.shape[dim] != old:
        return t
    return t.index_select(dim, torch.arange(new, device=t.device) % old)


def _is_flags(t: Tensor) -> bool:
    """Masks: true and false, 0 and 1, or numbers so low that they stand for minus infinity."""
    return t.dtype is torch.bool or bool(((t == 0) | (t == 1) | (t < -1e4)).all())


def _is_idle(mask: Tensor) -> bool:
    """A mask that says the same of everything."""
    return mask.dim() > 1 and mask.numel() > 1 and bool((mask == mask.flatten()[0]).all())


def _masking(t: Tensor) -> Tensor:
    """An idle mask that says otherwise of the last place in the first row: there a model may do what it did not."""
    if not (_is_flags(t) and _is_idle(t)):
        return t
    axis = max((axis for axis in range(1, t.dim()) if t.shape[axis] > 1), default=0)
    t, other = t.clone(), t.flatten()[0] == 0
    (t[0].select(axis - 1, -1) if axis else t[-1]).copy_(other)
    return t


def _tops(model: nn.Module, data: list[Tensor]) -> list[int | None]:
    """How far to draw numbers that are one number all over in the example, as of tokens: rows of the embeddings."""
    if not any(not t.dtype.is_floating_point and bool((t == t.flatten()[0]).all()) for t in data):
        return [None]
    rows = sorted({m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)})
    return [*rows[::-1], None]


def _drawn(
    t: Tensor, is_data: bool, change: Callable[[Tensor, bool], Tensor], generator: torch.Generator, top: int | None
) -> Tensor:
    """Other numbers of the same kind, in the changed shape."""
    t = change(t, is_data)
    if t.dtype.is_floating_point and t.numel() == 1:  # a factor, say
        return t * (1 + torch.rand((), generator=generator, dtype=torch.float64)).to(t) + 0.5
    if not is_data or not t.numel():
        return t
    if t.dtype.is_floating_point:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        spread = float(t.double().std(correction=0)) or 1.0
        return (noise.to(t.device) * spread + t.double().mean()).to(t.dtype)
    low, high = int(t.min()), int(t.max())
    if low == high and top is not None and 0 <= low < top:
        low, high = 0, top - 1
    return torch.randint(low, high + 1, t.shape, generator=generator).to(t.device, t.dtype)
