"""Look at the norms of any model while it trains, by hooks that change nothing about it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import normkit.watch.compiled as compiled
from normkit.norms import Norm
from normkit.norms._options import is_int
from normkit.norms._recompute import inside_backward
from normkit.watch.collect import Look, Memory, evaluate, gather, gather_gradient
from normkit.watch.quantities import choose
from normkit.watch.rows import Row, Rows
from normkit.watch.sites import Padding, Site, sites

BACKWARD = {"g_mu", "g_sigma2", "g_psi2", "dx_square", "dy_square", "channel_g", "window_g"}


@contextmanager
def record(
    model: nn.Module,
    every: int = 25,
    quantities: str | Iterable[str] | None = None,
    *,
    to: str | Path | Callable[[list[Row]], object] | None = None,
    keep: int = 200_000,
    start: int = 0,
    channel: int = 0,
    alpha: float = 0.9,
) -> Iterator[Rows]:
    """Record what the norms of a model see, each `every` of its training forwards; nothing about the training changes.

    Every norm is looked at, ours and others': where a norm keeps no running statistics, the recorder keeps the ones
    that batch statistics would have there, an average over looks (weight `alpha` of the old). `quantities` are names
    of `normkit.watch.QUANTITIES`; without, all but the dear ones; "all" has those too. `to`, `keep`: see `Rows`.
    `channel` is the one that is followed by itself; `start` the number of forwards made before, where a run is resumed.

    Values stay on the device until the rows are read. Of several processes the first one records, its own share of the
    batch (all of it for a norm with `sync=True`). Start before the first forward of a model that is compiled.

    >>> import normkit
    >>> model = nn.Sequential(nn.Linear(4, 4), normkit.make("pnv", 4))
    >>> with record(model, every=1, quantities=["distance_quadratic"]) as rows:
    ...     _ = model(torch.ones(3, 4)), model(torch.ones(3, 4))
    >>> [(row.step, row.site, row.quantity) for row in rows]
    [(1, '1', 'distance_quadratic'), (2, '1', 'distance_quadratic')]
    """
    recorder = Recorder(model, every, quantities, to=to, keep=keep, start=start, channel=channel, alpha=alpha)
    recorder.follow()
    try:
        yield recorder.rows
    finally:
        recorder.close()


class Recorder:
    """What `record` runs: hooks on the norms, and a clock that says when they look.

    `follow()` lets the model's own forward move the clock; a loop that calls parts of a model moves it by `tick()`
    before each step and `rest()` after it.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 25,
        quantities: str | Iterable[str] | None = None,
        *,
        to: str | Path | Callable[[list[Row]], object] | None = None,
        keep: int = 200_000,
        start: int = 0,
        channel: int = 0,
        alpha: float = 0.9,
    ):
        if not isinstance(model, nn.Module):
            raise TypeError(f"record() takes an nn.Module; got {type(model).__name__}")
        for option, number in (("every", every), ("start", start), ("channel", channel)):
            if not is_int(number):
                raise TypeError(f"{option} must be a whole number; got {number!r}")
        if every < 1:
            raise ValueError(f"every must be at least 1; got {every}")
        if not 0 <= alpha < 1:
            raise ValueError(f"alpha must be at least 0 and below 1; got {alpha}")
        if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
            raise ValueError("models with sharded parameters (FSDP2) cannot be recorded; DDP ones can. Train without"
                             " recording: --record-every 0")  # fmt: skip
        self.model, self.every, self.step = model, every, start
        self.chosen = choose(quantities)
        self.needs = frozenset().union(*(quantity.needs for quantity in self.chosen.values()))
        self.due = self.active = False
        self.writes, found = _part(model)
        if self.needs - {"gradient"} and not sites(model):
            kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ValueError(
                f"record() found no norm: classes seen: {kinds}. What is of the whole model can be asked for by name, "
                'quantities=["gradient_norm"]'
            )
        self.rows = Rows(keep, to if self.writes else None)
        self.rows.refresh = self.settle
        self.sites = {site.name: site for site in found}
        self.memory = {name: Memory(alpha, 32, channel) for name in self.sites}
        self.padding = Padding(model)
        self._pending: list[Look] = []
        self._gradients: dict[int, Tensor] = {}
        self._norms: list[Any] = []  # hooks of parameters, while a step is looked at
        self._handles: list[Any] = list(self.padding.handles)
        self.key, self.ledger = compiled.enter(self), compiled.ledger(model)
        for index, site in enumerate(self.sites.values()):
            hook = _Hook(self, site, index)
            self._handles.append(site.module.register_forward_pre_hook(hook.before, with_kwargs=True))
            if self.needs & BACKWARD:
                after = site.module.register_forward_hook(hook.after, with_kwargs=True, prepend=True)
                self._handles.append(after)

    # -- the clock ----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Let every training forward of the model be a step."""
        self._handles.append(self.model.register_forward_pre_hook(self._starts, with_kwargs=True, prepend=True))
        self._handles.append(self.model.register_forward_hook(self._ends))

    def tick(self) -> None:
        """A training step begins."""
        if self.due:
            self.settle()
            self._forget_gradients()
        self.step += 1
        self.due = (self.step - 1) % self.every == 0
        self.active = True
        if self.due and "gradient" in self.needs and self.writes:
            for number, parameter in enumerate(self.model.parameters()):
                if parameter.requires_grad and parameter.is_leaf:
                    keep = _KeepNorm(self._gradients, number)
                    self._norms.append(parameter.register_post_accumulate_grad_hook(keep))

    def rest(self) -> None:
        """The forward is over; its backward, and what that recomputes, still belong to the step."""
        self.active = False

    def _starts(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model.training:
            if torch.compiler.is_compiling():
                compiled.tick(self.ledger, self.key)
                return
            self.padding.start(args, kwargs)
            self.tick()

    def _ends(self, model: nn.Module, args: tuple, output: object) -> None:
        if not torch.compiler.is_compiling():
            self.rest()

    # -- what is seen -------------------------------------------------------------------------------------------------

    def at(self, index: int) -> Site:
        """The norm of this number."""
        return list(self.sites.values())[index]

    def looks_at(self, module: nn.Module) -> bool:
        """Whether a call of this norm is to be looked at: in a forward that is due, or recomputed by its backward."""
        return self.due and module.training and (self.active or inside_backward())

    @torch.no_grad()
    def look(self, site: Site, x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Note the input of a norm; mean and variance, for the gradient's look."""
        x, memory = site.rows(x), self.memory[site.name]
        real = self.padding.mask(x.shape[:-1])
        if not site.stateful and mask is None:
            mask = real  # what batch statistics would be if they were told of the padding
        fields = gather(site, memory, x, mask, real)
        fields |= self._remembered(site, "x", fields["quadratic"])
        self._pending.append(Look(self.step, site, fields))
        return fields["mean"], fields["var"]

    @torch.no_grad()
    def look_back(
        self, step: int, site: Site, x: Tensor, dy: Tensor, mask: Tensor | None, seen: tuple[Tensor, Tensor] | None
    ) -> None:
        """Note the gradient of a norm's output; `seen` is what its look at the input gave, if there was one."""
        x, dy = site.rows(x), site.rows(dy)
        if not site.stateful and mask is None:
            mask = self.padding.mask(x.shape[:-1])
        fields = gather_gradient(site, x, dy, mask, seen)
        fields |= self._remembered(site, "g", fields["g_psi2"])
        self._pending.append(Look(step, site, fields))

    def _remembered(self, site: Site, side: str, value: Tensor) -> dict[str, Tensor]:
        memory, found = self.memory[site.name], {}
        if f"channel_{side}" in self.needs:
            found |= memory.push(side, value, int(getattr(site.module, "window", 4)))
        if f"window_{side}" in self.needs:
            found |= memory.fill(side, value)
        return found

    @torch.no_grad()
    def settle(self) -> None:
        """Turn the looks so far into rows, on the device."""
        if self._gradients:
            norms = torch.stack([norm.to(torch.float32) for _, norm in sorted(self._gradients.items())])
            self._gradients.clear()
            self._pending.append(Look(self.step, None, {"gradient": norms}))
        looks, self._pending = self._pending, []
        if self.writes:
            for step, site, names, values in evaluate(looks, self.chosen):
                self.rows.add(step, site.name if site else "", site.norm if site else "", tuple(names), values)

    def _forget_gradients(self) -> None:
        for handle in self._norms:
            handle.remove()
        self._norms.clear()

    def close(self) -> None:
        """Take the hooks away; the rows stay readable."""
        for handle in self._handles:
            handle.remove()
        self._forget_gradients()
        compiled.leave(self.key)
        self.rows.flush()
        self.due = self.active = False

    # -- resuming -----------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a resumed recording needs, beside the step, to see what this one would have seen."""
        self.settle()
        return {name: memory.state() for name, memory in self.memory.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave; norms that it does not know start anew."""
        for name, memory in self.memory.items():
            if name in state:
                memory.load(state[name])


class _Hook:
    """The two hooks of one norm."""

    def __init__(self, recorder: Recorder, site: Site, index: int):
        self.recorder, self.site, self.index = recorder, site, index
        self.ledger = compiled.ledger(recorder.model)
        self.seen: tuple[Tensor, Tensor] | None = None

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Look at the input, before the norm moves its statistics."""
        if torch.compiler.is_compiling():
            if module.training:
                x, mask = _input(self.site, args, kwargs)
                compiled.look(x, mask, self.ledger, self.recorder.key, self.index)
            return
        self.seen = None
        if self.recorder.looks_at(module) and not inside_backward():  # what is recomputed was seen before
            x, mask = _input(self.site, args, kwargs)
            self.seen = self.recorder.look(self.site, x, mask)

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], y: Tensor) -> Tensor | None:
        """Look at the gradient, when it comes."""
        if torch.compiler.is_compiling():
            if module.training and torch.is_grad_enabled():
                x, mask = _input(self.site, args, kwargs)
                return compiled.Tap.apply(y, x, mask, self.ledger, self.recorder.key, self.index)
            return None
        if self.recorder.looks_at(module) and isinstance(y, Tensor) and y.requires_grad:
            x, mask = _input(self.site, args, kwargs)
            recorder, site, step, seen, x = self.recorder, self.site, self.recorder.step, self.seen, x.detach()
            y.register_hook(lambda dy: recorder.look_back(step, site, x, dy, mask, seen))
        self.seen = None
        return None


class _KeepNorm:
    """Keeps the norm of a parameter's gradient, as soon as it is there."""

    def __init__(self, found: dict[int, Tensor], number: int):
        self.found, self.number = found, number

    @torch.no_grad()
    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.found[self.number] = torch.linalg.vector_norm(parameter.grad)


def _input(site: Site, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
    """The input and the mask that a norm is called with."""
    if isinstance(site.module, Norm):
        x = kwargs["x"] if "x" in kwargs else args[0]
        return x, site.module.check(x, kwargs.get("mask", args[1] if len(args) > 1 else None))
    return args[0] if args else next(iter(kwargs.values())), None


def _part(model: nn.Module) -> tuple[bool, list[Site]]:
    """Whether this process writes rows, and the norms it has to look at: elsewhere those that are looked at jointly."""
    found = sites(model)
    group = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not group or torch.distributed.get_rank() == 0:
        return True, found
    return False, [site for site in found if getattr(site.module, "sync", False)]
