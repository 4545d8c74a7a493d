"""Fit norms to the norms that they replaced, in one forward of both models."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.models.checks import copy_model
from normkit.models.fastpath import no_fast_path
from normkit.models.invoke import Forward, call, input_and_mask
from normkit.models.take_apart import take_norms_apart
from normkit.norms import RepBN, StatNorm

Pause = Callable[[Any], None]


def fit_like(
    model: nn.Module, norms: Mapping[str, StatNorm], like: nn.Module, batches: Sequence[Any], forward: Forward | None,
    on_progress: Callable[[int, int], object] | None,
) -> None:  # fmt: skip
    """Fit statistics, gain and bias of norms to the outputs of the original, by least squares.

    All batches go through both models side by side. A forward waits where it comes to a norm. When no forward can still
    bring rows for an earlier norm, the norm is solved, and the forwards that wait there go on. So each norm is solved
    on inputs that fitted norms made, each model computes each batch once, and only the tensors of forwards under way
    are in memory. The original computes the first batch once more, to find the order of norms. A norm that runs several
    times in a forward costs one more forward of both models, as its later inputs depend on it.

    Raises:
        ValueError: If `like` does not fit the model, a norm never ran, or its rows were padding or not finite.
    """
    if not batches:
        raise ValueError("calibrate() was given no batches")
    if set(norms) - _names(like):
        take_norms_apart(like := copy_model(like), norms)  # modules of norm and activation
    if absent := sorted(set(norms) - _names(like)):
        raise ValueError(f"calibrate() takes the model that was converted as `like`; it has no {', '.join(absent)}")
    found: dict[str, Moments] = {}
    done: set[str] = set()  # norms that ran several times, at which forwards wait no more
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_fast_path())
        runs = Counter(name for name, _ in _visits(like, norms, batches[0], forward, done, before=False))
        order = [*runs, *(name for name in norms if name not in runs)]  # to solve in, if batches wait at several norms
        calls = [_calls(model, like, norms, batch, forward, done) for batch in batches]
        for each in calls:
            stack.enter_context(contextlib.closing(each))
        waiting = {each: next(each, None) for each in calls}
        while waiting := {each: at for each, at in waiting.items() if at is not None}:
            name = min((at[0] for at in waiting.values()), key=order.index)
            here = {each: rows for each, (at, rows) in waiting.items() if at == name}
            rows: Iterable[Moments] = here.values()
            if runs[name] > 1:
                own = {name: norms[name]}
                rows = (rows for batch in batches for _, rows in _calls(model, like, own, batch, forward))
                done.add(name)
            found[name] = functools.reduce(Moments.join, rows, *([found[name]] if name in found else []))
            if not found[name].usable:
                raise ValueError(f"calibrate() found no finite activations of real tokens at {name}")
            solve(norms[name], found[name])
            if on_progress is not None:
                on_progress(len(found), len(norms))
            waiting |= {each: next(each, None) for each in here}
    if idle := [name for name in norms if name not in found]:
        raise ValueError(f"calibrate() found norms that never ran, so they have no statistics: {', '.join(idle)}")


def _names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_modules(remove_duplicate=False)}


class Moments(NamedTuple):
    """Number, means and sums of products of deviations of paired rows x and y, in float64."""

    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    x: Tensor
    y: Tensor
    xx: Tensor
    xy: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "Moments":
        """Measure rows `[n, channels]`."""
        x, y = x.double(), y.double()
        mean_x, mean_y = (each.sum(0) / max(len(each), 1) for each in (x, y))
        x = x - mean_x
        return cls(len(x), mean_x, mean_y, x.square().sum(0), (x * (y - mean_y)).sum(0))

    def join(self, other: "Moments") -> "Moments":
        """Return the moments of the rows of both."""
        count = self.count + other.count
        share = other.count / max(count, 1)
        dx, dy = other.x - self.x, other.y - self.y
        between = share * self.count
        xx, xy = self.xx + other.xx + between * dx * dx, self.xy + other.xy + between * dx * dy
        return Moments(count, self.x + share * dx, self.y + share * dy, xx, xy)

    @property
    def usable(self) -> bool:
        """True if there are rows, and all are finite."""
        return self.count > 0 and bool(torch.stack(self[1:]).isfinite().all())


def set_statistics(norm: StatNorm, statistics: Tensor) -> None:
    """Set the running statistics `[k, channels]` of a norm."""
    norm.running.copy_(statistics)
    norm.was_set = True
    if norm.follows_optimizer:
        norm.get_buffer("pending").zero_()  # else the optimizer's step brings back the old ones


def solve(norm: StatNorm, rows: Moments) -> None:
    """Set statistics, gain and bias from rows that a norm reads and should return."""
    variance = rows.xx / rows.count
    statistics = torch.stack([rows.x, variance] if norm.center else [variance + rows.x.square()])
    set_statistics(norm, statistics)
    if norm.weight is None:
        return
    center = norm.running[0].double() if norm.center else torch.zeros_like(rows.x)
    scale = torch.rsqrt(norm.running[-1].double() + norm.eps)
    y, xy, shift = rows.y, rows.xy, rows.x - center
    if isinstance(norm, RepBN):
        y, xy = y - norm.a.double() * rows.x, xy - norm.a.double() * rows.xx
    products, squares = xy, rows.xx
    if norm.bias is None:  # the line goes through the origin, not through the means
        products, squares = xy + rows.count * shift * y, squares + rows.count * shift.square()
    gain = products / (scale * squares).clamp(min=torch.finfo(torch.double).tiny)
    norm.weight.copy_(gain)
    if norm.bias is not None:
        norm.bias.copy_(y - gain * scale * shift)


def _calls(
    model: nn.Module, like: nn.Module, norms: Mapping[str, StatNorm], batch: Any, forward: Forward | None,
    done: Collection[str] = (),
) -> Generator[tuple[str, Moments], None, None]:  # fmt: skip
    """Run both models on a batch, and yield name and rows of each call of a norm that is not done."""
    inputs = _visits(model, norms, batch, forward, done, before=True)
    outputs = _visits(like, norms, batch, forward, done, before=False)
    with contextlib.closing(inputs), contextlib.closing(outputs):
        for name, (x, mask) in inputs:
            same, y = next(outputs, ("", x[:0]))
            y = y.movedim(norms[name].channel_dim, -1)
            if name != same or y.shape != x.shape:
                raise ValueError(f"calibrate() takes the model that was converted as `like`; {name} differs in it")
            yield name, Moments.of(*(each.flatten(0, -2) if mask is None else each[mask] for each in (x, y)))
        if extra := next(outputs, None):
            raise ValueError(f"calibrate() takes the model that was converted as `like`; only it calls {extra[0]}")


def _visits(
    model: nn.Module, names: Iterable[str], batch: Any, forward: Forward | None, done: Collection[str], before: bool
) -> Generator[tuple[str, Any], None, None]:
    """Run a model on a batch, and yield the name of each norm that is not done where it is called.

    With the name comes its input and mask, `before` it computes, or its output. The forward runs a copy that shares the
    tensors, so that what it keeps in modules, such as masks, is its own.
    """

    def run(pause: Pause) -> None:
        twin = copy_model(model, share_all=True)

        def wait(name: str, norm: Any, args: tuple, kwargs: dict[str, Any], *output: Tensor) -> None:
            if name not in done:
                pause((name, output[0] if output else _input(norm, args, kwargs)))

        for name in names:
            norm = twin.get_submodule(name)
            register: Any = norm.register_forward_pre_hook if before else norm.register_forward_hook
            register(functools.partial(wait, name), with_kwargs=True)
        call(twin, batch, forward)

    return _pauses(run)


def _input(norm: StatNorm, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """What a norm measures, and its mask."""
    x, mask = input_and_mask(args, kwargs)
    mask = norm.check(x, mask)
    return norm.rest(x), mask


class _Stop(BaseException):
    """Ends a function that waits."""


def _pauses(run: Callable[[Pause], object]) -> Generator[Any, None, None]:
    """Call `run(pause)` in a thread, and yield what it passes to `pause`.

    There the thread waits until the next value is taken. It never runs at the same time as the caller.
    """
    events: SimpleQueue = SimpleQueue()
    go_on: SimpleQueue = SimpleQueue()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}

    def pause(value: Any) -> None:
        events.put((True, value))
        if not go_on.get():
            raise _Stop

    def work() -> None:
        error = None
        try:
            with contextlib.ExitStack() as modes, torch.no_grad(), torch.cuda.stream(stream):
                # PyTorch keeps modes and streams by thread
                for kind, dtype in autocast.items():
                    modes.enter_context(torch.autocast(kind, dtype))
                run(pause)
        except BaseException as problem:
            error = problem
        events.put((False, error))

    thread = Thread(target=work, daemon=True, name="normkit-forward")
    thread.start()
    try:
        while True:
            waits, value = events.get()
            if not waits:
                if value is not None:
                    raise value
                return
            yield value
            go_on.put(True)
    finally:
        go_on.put(False)
        thread.join()
