"""Make inputs like an example: random numbers in other shapes."""

import itertools
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normkit.fold.float64 import on_cpu
from normkit.models.invoke import Call, tensors

Run = Callable[[str, bool, Call], object]  # of a label, True if sizes differ, and the call


@dataclass(frozen=True)
class Change:
    """Another batch, other sizes of some axes, or a mask that masks.

    `sizes` are new lengths of axes of the input `like`; inputs that are no data follow in each axis of that length but
    the batch's.
    """

    label: str
    batch: tuple[int, int] | None = None  # its rows, and how many there will be
    like: Tensor | None = None
    sizes: dict[int, int] = field(default_factory=dict)
    masks: bool = False

    def lengths(self, t: Tensor, is_data: bool) -> dict[int, int]:
        """New lengths of axes of an input."""
        if not t.dim() or not t.numel():
            return {}
        if self.batch and t.shape[0] == self.batch[0]:
            return {0: self.batch[1]}
        if self.like is None:
            return {}
        if is_data and t.dim() == self.like.dim():
            return {axis: new for axis, new in self.sizes.items() if t.shape[axis] == self.like.shape[axis]}
        others = range(int(t.shape[0] == self.like.shape[0]), t.dim())
        new = {self.like.shape[axis]: length for axis, length in self.sizes.items()}
        return {axis: new[t.shape[axis]] for axis in others if t.shape[axis] in new}


def variants(model: nn.Module, example: Call, other_shapes: bool = True, run: Run | None = None) -> dict[str, Call]:
    """Make random inputs after an example: calls by label.

    Everything changes in one call: numbers, batch, lengths and sizes. Where the model refuses that, each is changed
    alone. Masks and flags keep their values, except that a mask without anything masked gets a masked position.
    Arguments that are no tensors stay. Calls that the model refuses are left out.

    Without `other_shapes` lengths and sizes stay. `run` tries a call, the model itself by default; calls of other sizes
    come first.
    """
    run = run or (lambda label, resized, call: call.of(model))
    given, data = _inputs(example)
    found: dict[str, Call] = {}

    def accepted(*changes: Change) -> bool:
        label = _label(changes)
        for top in _tops(model, data):
            call = _changed(example, changes, len(found), top)
            try:
                run(label, any(change.sizes for change in changes), call)
                found[label] = call
                return True
            except Exception as refusal:
                traceback.clear_frames(refusal.__traceback__)  # which keep the model alive
        return False

    sizes = [plan for t in data if other_shapes for plan in [_other_sizes(t)] if plan]
    same = _same_sizes(given, data)
    most = max((len(plan) for plan in sizes), default=1)
    together = ([*(plan[min(k, len(plan) - 1)] for plan in sizes), *same] for k in range(most))
    if not any(itertools.starmap(accepted, together)):
        for plan in (*sizes, *([change] for change in same)):
            any(map(accepted, plan))
        if not found:
            accepted(Change("the same shapes"))
    return found


def longer(example: Call) -> tuple[str, Call] | None:
    """Make a call with a token more in each sequence; None without sequences."""
    changes = tuple(
        _length(t, {1: t.shape[1] + 1})
        for t in _inputs(example)[1]
        if t.dim() == (3 if t.dtype.is_floating_point else 2)
    )
    return (_label(changes), _changed(example, changes, 0, None)) if changes else None


def _inputs(call: Call) -> tuple[list[Tensor], list[Tensor]]:
    """Return all tensors of a call, and those that are data, not masks or flags."""
    given = [t for t in tensors(call).values() if t.dim() > 0 and t.layout is torch.strided]
    return given, [t for t in given if not _is_flags(t)] or [t for t in given[:1] if t.dtype is not torch.bool]


def _label(changes: tuple[Change, ...]) -> str:
    return ", ".join(change.label for change in changes)


@on_cpu()
def _changed(example: Call, changes: tuple[Change, ...], seed: int, top: int | None) -> Call:
    """Draw the inputs of a changed call."""
    generator, data = torch.Generator().manual_seed(seed), {id(t) for t in _inputs(example)[1]}
    return example.copied(lambda t: _drawn(t, id(t) in data, changes, generator, top))


def _same_sizes(given: list[Tensor], data: list[Tensor]) -> list[Change]:
    """Another batch, and masks that mask."""
    changes = []
    if given:
        rows = [t.shape[0] for t in given]
        batch = max(set(rows), key=rows.count)
        new = 1 if batch > 1 and any(_is_picture(t) for t in data) else 2 if batch > 2 else batch + 1
        changes.append(Change(f"a batch of {new}", batch=(batch, new)))
    if any(_is_flags(t) and _is_idle(t) for t in given if not any(t is each for each in data)):
        changes.append(Change("masks that mask", masks=True))
    return changes


def _other_sizes(t: Tensor) -> list[Change]:
    """Other lengths or sizes of one input; the first that the model accepts is used.

    A length shrinks by one, a long one by about a half, that of sound by a fifth. Images grow: by an odd number that
    is more than a patch, so that patches and windows have to be padded, or else by what fixed patches allow. They never
    shrink: Swin of transformers keeps the smaller windows that it then takes.
    """
    numbers, old = t.dtype.is_floating_point, t.shape
    if _is_picture(t):
        grown = [
            _pixels(t, dict(zip(axes, new, strict=True)))
            for axes in (range(2, t.dim()), range(1, t.dim() - 1))  # channels first, channels last
            if min(old[axis] for axis in axes) > 3
            for new in (*([old[a] + more for a in axes] for more in (17, 16, 32)),
                        *([old[a] + old[a] // part for a in axes] for part in (4, 2)))
        ]  # fmt: skip
        return grown + [_length(t, {axis: n - 1}) for axis, n in enumerate(old) if axis and n > 2]
    if t.dim() == 2 and numbers and old[1] > 5:
        return [_length(t, {1: old[1] - old[1] // 5}), _length(t, {1: old[1] - 1})]
    less = {axis: n - 1 for axis, n in enumerate(old[: 2 + numbers]) if axis and n > 2 and t.dim() < 4}
    half = {axis: old[axis] // 2 | 1 for axis in less if old[axis] > 16}
    alone = [{axis: new} for sizes in (half, less) for axis, new in sizes.items()]
    return [_length(t, each) for each in ([half, less] if len(less) > 1 else []) + alone if each]


def _is_picture(t: Tensor) -> bool:
    return t.dtype.is_floating_point and t.dim() in (4, 5)


def _pixels(t: Tensor, sizes: dict[int, int]) -> Change:
    new = [*sizes.values()]
    return Change(f"{new[0] if len(set(new)) == 1 else ' x '.join(map(str, new))} pixels", like=t, sizes=sizes)


def _length(t: Tensor, sizes: dict[int, int]) -> Change:
    names = (f"{new} tokens" if axis == 1 else f"length {new}" for axis, new in sizes.items())
    return Change(" and ".join(names), like=t, sizes=sizes)


def _is_flags(t: Tensor) -> bool:
    """True for a mask: booleans, zeros and ones, or numbers that stand for minus infinity."""
    return t.dtype is torch.bool or bool(((t == 0) | (t == 1) | (t < -1e4)).all())


def _is_idle(mask: Tensor) -> bool:
    """True for a mask with the same value everywhere."""
    return mask.dim() > 1 and mask.numel() > 1 and bool((mask == mask.flatten()[0]).all())


def _masking(t: Tensor) -> Tensor:
    """An idle mask with the other value at the last position of the first row."""
    axis = max((axis for axis in range(1, t.dim()) if t.shape[axis] > 1), default=0)
    t, other = t.clone(), t.flatten()[0] == 0
    (t[0].select(axis - 1, -1) if axis else t[-1]).copy_(other)
    return t


def _tops(model: nn.Module, data: list[Tensor]) -> list[int | None]:
    """Upper limits for constant zeros and ones, rows of embeddings; None keeps constants."""
    if not any(not t.dtype.is_floating_point and bool((t == t.flatten()[0]).all()) for t in data):
        return [None]
    rows = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)} or {2}
    return [*sorted(rows, reverse=True), None]


def _drawn(
    t: Tensor, is_data: bool, changes: tuple[Change, ...], generator: torch.Generator, top: int | None
) -> Tensor:
    """Random numbers of the same kind, in the changed shape."""
    lengths = {axis: new for change in changes for axis, new in change.lengths(t, is_data).items()}
    for axis, new in lengths.items():
        t = t.index_select(axis, torch.arange(new, device=t.device) % t.shape[axis])
    if not is_data and any(change.masks for change in changes) and _is_flags(t) and _is_idle(t):
        t = _masking(t)
    if t.dtype.is_floating_point and t.numel() == 1:  # a factor, say
        return t * (1 + torch.rand((), generator=generator, dtype=torch.float64)).to(t) + 0.5
    if not is_data or not t.numel():
        return t
    if t.dtype.is_floating_point:
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64)
        spread = float(t.double().std(correction=0)) or 1.0
        return (noise.to(t.device) * spread + t.double().mean()).to(t.dtype)
    low, high = int(t.min()), int(t.max())
    if low == high and top is not None and low >= 0:  # larger numbers are lengths, say
        low, high = (0, top - 1) if low < 2 else (1, low)
    return torch.randint(low, high + 1, t.shape, generator=generator).to(t.device, t.dtype)
