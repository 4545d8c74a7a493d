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
    both = _Models(model, like, forward)
    found: dict[str, Moments] = {}
    done: set[str] = set()  # norms that ran several times, at which forwards wait no more
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_fast_path())
        runs = Counter(name for name, _ in _pauses(functools.partial(both.run_original, norms, batches[0], done)))
        order = [*runs, *(name for name in norms if name not in runs)]  # to solve in, if batches wait at several norms
        calls = [stack.enter_context(contextlib.closing(both.calls(norms, batch, done))) for batch in batches]
        waiting = {each: next(each, None) for each in calls}
        while waiting := {each: at for each, at in waiting.items() if at is not None}:
            name = min((at[0] for at in waiting.values()), key=order.index)
            here = {each: rows for each, (at, rows) in waiting.items() if at == name}
            rows: Iterable[Moments] = here.values()
            if runs[name] > 1:
                rows = (rows for batch in batches for _, rows in both.calls({name: norms[name]}, batch))
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
    """Moments `[channels]` of paired rows x and y, in float64: number, means, sums of products of deviations."""

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
    norm.running.copy_(norm.pool(statistics))
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


class _Models(NamedTuple):
    """A converted model and the original. Forwards run copies that share their tensors.

    So what a forward keeps in modules, such as masks, is its own.
    """

    model: nn.Module
    like: nn.Module
    forward: Forward | None

    def calls(
        self, norms: Mapping[str, StatNorm], batch: Any, done: Collection[str] = ()
    ) -> Generator[tuple[str, Moments], None, None]:
        """Run both on a batch, and yield name and rows of each call of a norm that is not done."""
        runs = (functools.partial(run, norms, batch, done) for run in (self.run_model, self.run_original))
        inputs, outputs = map(_pauses, runs)
        with contextlib.closing(inputs), contextlib.closing(outputs):
            for name, (x, mask) in inputs:
                same, y = next(outputs, ("", x[:0]))
                y = y.movedim(norms[name].channel_dim, -1)
                if name != same or y.shape != x.shape:
                    raise ValueError(f"calibrate() takes the model that was converted as `like`; {name} differs in it")
                rows = [each.flatten(0, -2) if mask is None else each[mask] for each in (x, y)]
                yield name, Moments.of(*rows)
            if extra := next(outputs, None):
                raise ValueError(f"calibrate() takes the model that was converted as `like`; only it calls {extra[0]}")

    def run_model(self, norms: Iterable[str], batch: Any, done: Collection[str], pause: Pause) -> None:
        """Pass on name, input and mask of each call of a norm, before it computes."""

        def wait(name: str, norm: StatNorm, args: tuple, kwargs: dict[str, Any]) -> None:
            if name not in done:
                x, mask = input_and_mask(args, kwargs)
                mask = norm.check(x, mask)
                pause((name, (norm.rest(x), mask)))

        model = copy_model(self.model, share_all=True)
        for name in norms:
            norm = model.get_submodule(name)
            norm.register_forward_pre_hook(functools.partial(wait, name), with_kwargs=True)
        call(model, batch, self.forward)

    def run_original(self, norms: Iterable[str], batch: Any, done: Collection[str], pause: Pause) -> None:
        """Pass on name and output of each call of a norm."""

        def wait(name: str, norm: nn.Module, args: tuple, y: Tensor) -> None:
            if name not in done:
                pause((name, y))

        like = copy_model(self.like, share_all=True)
        for name in norms:
            like.get_submodule(name).register_forward_hook(functools.partial(wait, name))
        call(like, batch, self.forward)


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
