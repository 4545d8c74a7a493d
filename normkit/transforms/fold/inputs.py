"""Make inputs after an example: random numbers in the same and in other shapes."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

Call = tuple[tuple, dict[str, Any]]  # positional and keyword arguments

SAME_SIZES = ("the example", "the same shapes", "a larger batch", "masks that mask")  # labels of calls


@dataclass(frozen=True)
class Change:
    """New sizes for some axes of one input, and for the inputs that follow it."""

    like: Tensor
    sizes: dict[int, int]  # axis: its new size

    def of(self, t: Tensor, is_data: bool) -> Tensor:
        """Resize data in the same axes, and masks in each axis of that length but the batch's."""
        if is_data and t.dim() == self.like.dim():
            changes = [(axis, self.like.shape[axis], new) for axis, new in self.sizes.items()]
        else:
            first = int(t.dim() > 0 and t.shape[0] == self.like.shape[0])
            changes = [(axis, self.like.shape[a], n) for axis in range(first, t.dim()) for a, n in self.sizes.items()]
        for axis, old, new in changes:
            t = _resized(t, axis, old, new)
        return t


Plan = dict[str, Callable[[Tensor, bool], Tensor]]  # by label: the change of an input, which is data or is not


def variants(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    other_shapes: bool = True,
    run: Callable[[str, tuple, dict[str, Any]], object] | None = None,
) -> dict[str, Call]:
    """Make random inputs after an example.

    They have the same shapes, one more in the batch, masks that mask something, and other sizes. Masks and flags keep
    their values, except that a mask without anything masked is also tried with a masked position.
    Arguments that are no tensors stay. Calls that the model refuses are left out.

    Args:
        model: The model, in the type of the example.
        args: Positional arguments of the example.
        kwargs: Keyword arguments of the example.
        other_shapes: Vary lengths and sizes, too, not the batch alone.
        run: Runs `(label, args, kwargs)` and raises for a call to leave out; the model itself by default. Calls of
            other sizes come first.

    Returns:
        The calls by label.
    """
    run = run or (lambda label, args, kwargs: model(*args, **kwargs))
    leaves, spec = tree_flatten((args, kwargs))
    given = [t for t in leaves if isinstance(t, Tensor) and t.dim() > 0]
    data = [t for t in given if not _is_flags(t)] or [t for t in given[:1] if t.dtype is not torch.bool]
    of_data = {id(t) for t in data}
    same = _same_sizes(given, of_data)
    plans = [*same, *(plan for t in data for plan in _other_sizes(t) if other_shapes)]
    found: dict[str, Call] = {}
    for seed, plan in (*[*enumerate(plans)][len(same) :], *enumerate(same)):
        for (label, change), top in itertools.product(plan.items(), _tops(model, data)):
            if label in found:
                break
            generator = torch.Generator().manual_seed(seed)
            new = [_drawn(t, id(t) in of_data, change, generator, top) if isinstance(t, Tensor) else t for t in leaves]
            call = tree_unflatten(new, spec)
            with contextlib.suppress(Exception):
                run(label, *call)
                found[label] = call
                break
    labels = sorted(found, key=lambda label: label not in SAME_SIZES)
    return {label: found[label] for label in labels}


def _same_sizes(given: list[Tensor], of_data: set[int]) -> list[Plan]:
    """Other numbers, one more in the batch, and masks that mask."""
    plans: list[Plan] = [{"the same shapes": lambda t, is_data: t}]
    if given:
        sizes = [t.shape[0] for t in given]
        batch = max(set(sizes), key=sizes.count)
        plans.append({"a larger batch": lambda t, is_data: _resized(t, 0, batch, batch + 1)})
    if any(_is_idle(t) for t in given if id(t) not in of_data):
        plans.append({"masks that mask": lambda t, is_data: t if is_data else _masking(t)})
    return plans


def _other_sizes(t: Tensor) -> Iterator[Plan]:
    """Plans that change one length or size; the first accepted label of each is used.

    A length shrinks by one, that of sound also by a fifth. Images grow by a quarter, or else by a half, and by as
    little as the patches allow, so that windows of patches have to be padded. They never shrink: Swin of transformers
    keeps the smaller windows that it then takes.
    """
    numbers = t.dtype.is_floating_point
    for axis in range(1, min(t.dim(), 2 + numbers)) if t.dim() < 4 else ():
        old = t.shape[axis]
        shorter = {old - 1, old - old // 5} if t.dim() == 2 and numbers else {old - 1}  # sound: by more than a frame
        for new in sorted(shorter - {old}, reverse=True) if old > 2 else ():
            yield {f"{new} tokens" if axis == 1 else f"length {new}": Change(t, {axis: new}).of}
    if t.dim() not in (4, 5) or not numbers:
        return
    last: Plan = {}
    for axes in (range(2, t.dim()), range(1, t.dim() - 1)):  # channels first, channels last
        old = [t.shape[axis] for axis in axes]
        if min(old) > 3:
            yield dict(_pixels(t, axes, [n + n // part for n in old]) for part in (4, 2))
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
    """True for a mask: booleans, zeros and ones, or numbers that stand for minus infinity."""
    return t.dtype is torch.bool or bool(((t == 0) | (t == 1) | (t < -1e4)).all())


def _is_idle(mask: Tensor) -> bool:
    """True for a mask with the same value everywhere."""
    return mask.dim() > 1 and mask.numel() > 1 and bool((mask == mask.flatten()[0]).all())


def _masking(t: Tensor) -> Tensor:
    """An idle mask with the other value at the last position of the first row."""
    if not (_is_flags(t) and _is_idle(t)):
        return t
    axis = max((axis for axis in range(1, t.dim()) if t.shape[axis] > 1), default=0)
    t, other = t.clone(), t.flatten()[0] == 0
    (t[0].select(axis - 1, -1) if axis else t[-1]).copy_(other)
    return t


def _tops(model: nn.Module, data: list[Tensor]) -> list[int | None]:
    """Upper limits for integers that are constant in the example: rows of embeddings."""
    if not any(not t.dtype.is_floating_point and bool((t == t.flatten()[0]).all()) for t in data):
        return [None]
    rows = sorted({m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)})
    return [*rows[::-1], None]


def _drawn(
    t: Tensor, is_data: bool, change: Callable[[Tensor, bool], Tensor], generator: torch.Generator, top: int | None
) -> Tensor:
    """Random numbers of the same kind, in the changed shape."""
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
