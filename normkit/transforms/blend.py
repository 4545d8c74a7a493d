"""A norm that fades into another while the model trains, until the first is gone."""

import collections
import copy
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from normkit.kernels import autograd
from normkit.norms import Norm, Split
from normkit.transforms.checks import copy_model, refuse_quantized, refuse_wrapped
from normkit.transforms.convert import HOOKS, chosen_sites, find, put, replacement
from normkit.transforms.fastpath import leave_fast_path
from normkit.transforms.masks import MaskFrom, route_mask
from normkit.transforms.model_changes import record_changes
from normkit.transforms.third_party import equivalent, read

Schedule = Literal["linear", "cosine"]


class Blend(Norm):
    """`y = share * old(x) + (1 - share) * new(x)`, with one gain and bias for both.

    What cannot be the same for both, such as ScaleNorm's one length or the bias of a norm that fades into one without,
    stays with the old norm and goes with it.

    In the k-th training forward `share` is `1 - k / steps`, so the last of `steps` forwards is all new. The count is
    the buffer `step`, so it goes into checkpoints and comes back from them; a recomputed forward (activation
    checkpointing) does not count twice. At inference it blends likewise, the new norm by its running statistics. Once
    `share` is 0 only the new norm acts, and `settle` puts it in this one's place.
    """

    batch_free = False
    old: Norm
    new: Norm
    step: Tensor

    def __init__(self, old: Norm, new: Norm, *, steps: int, schedule: Schedule = "linear"):
        super().__init__(new.dim, eps=new.eps, affine=False)
        self.old, self.new, self.steps, self.schedule = old, new, steps, schedule
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.weight, self.bias = new.weight, new.bias
        self.lent = [  # parameters stay this module's, under their old names
            (name, key)
            for name, norm in (("old", old), ("new", new))
            for key in ("weight", "bias")
            if getattr(self, key) is not None and getattr(norm, key) is getattr(self, key)
        ]
        for name, key in self.lent:
            delattr(getattr(self, name), key)
        self._lend()

    def _lend(self) -> None:
        """Let the two norms see the gain and bias, which may have been replaced since (by a wrapper or a loader)."""
        for name, key in self.lent:
            object.__setattr__(getattr(self, name), key, getattr(self, key))

    @property
    def offline(self) -> bool:  # type: ignore[override]
        """Whether what it becomes is frozen at inference."""
        return self.new.offline

    @property
    def spec(self) -> str:
        """What it becomes, and how; no row of NORMS."""
        return f"blend({self.old.spec}, {self.new.spec}, steps={self.steps})"

    def share(self) -> Tensor:
        """How much of the old norm is left, from 1 to 0."""
        left = (1 - self.step / self.steps).clamp(min=0)
        return left if self.schedule == "linear" else (1 - torch.cos(torch.pi * left)) / 2

    @property
    def done(self) -> bool:
        """Whether the old norm acts no longer. Asks the device."""
        return int(self.step) >= self.steps

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Blend; counts the step while training."""
        mask = self.mask if mask is None else mask
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if self.training and not recomputed:
            self.step.add_(1)
        share = self.share().to(x.dtype)
        if torch.compiler.is_compiling():
            (share,) = autograd.snapshot([share])  # a compiled backward would take that of the next step
        self._lend()
        return self.new(x, mask).lerp(self.old(x, mask), share)

    def settled(self) -> Norm:
        """The new norm with this one's gain, bias, hooks and mode."""
        kept = {id(tensor): tensor for tensor in (*self.parameters(), *self.new.buffers())}
        new = copy.deepcopy(self.new, kept)
        new.weight, new.bias = self.weight, self.bias
        for hooks in HOOKS:
            setattr(new, hooks, getattr(self, hooks))
        if hasattr(self, "channel_dim"):
            new.channel_dim = self.channel_dim  # type: ignore[assignment]
        return new.train(self.training)

    def split(self) -> Split:
        """That of the new norm, once it acts alone; ValueError before."""
        if not self.done:
            left = f"{int(self.step)} of {self.steps} training forwards done"
            raise ValueError(f"a blend has no split before its end ({left}); train on, then settle(model)")
        return self.settled().eval().split()

    def extra_repr(self) -> str:
        """How far it is."""
        return f"{self.dim}, step={int(self.step)} of {self.steps}, schedule={self.schedule!r}"


def blend(
    model: nn.Module,
    to: str | Mapping[str, str],
    steps: int,
    *,
    schedule: Schedule = "linear",
    where: Callable[[str, nn.Module], bool] | None = None,
    mask_from: MaskFrom = None,
    inplace: bool = False,
) -> nn.Module:
    """Return the model with each norm blended into a new one over `steps` training forwards.

    Train it as usual: at first every norm is what it was, at the end it is the new one (progressive
    re-parametrization, SLAB, arXiv:2405.11582). Gain and bias keep their names and are shared by both norms; the new
    one gathers its statistics from the first step on. Then `settle(model)` leaves plain norms. Arguments as in
    `convert`.

    >>> model = blend(nn.Sequential(nn.LayerNorm(4)), "un", steps=100)
    >>> model[0].share()
    tensor(1.)
    """
    refuse_wrapped(model, "blend")
    refuse_quantized(model, "blend")
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ValueError(f"steps must be a whole number of at least 1; got {steps!r}")
    if schedule not in ("linear", "cosine"):
        raise ValueError(f'schedule must be "linear" or "cosine"; got {schedule!r}')
    chosen = chosen_sites(model, to, where, "blend")
    model = model if inplace else copy_model(model)
    like = next(model.parameters(), None)
    made: dict[int, nn.Module] = {}
    for name, spec in chosen.items():
        old = model.get_submodule(name)
        if isinstance(old, Blend):
            made[id(old)] = old
        if id(old) not in made:
            made[id(old)] = _blended(old, spec, steps, schedule, like)
            made[id(made[id(old)])] = made[id(old)]
        model = put(model, name, made[id(old)])
    leave_fast_path(model)
    if mask_from is not None:
        route_mask(model, mask_from)
    record_changes(model)
    return model


def settle(model: nn.Module, *, early: bool = False, inplace: bool = False) -> nn.Module:
    """Return the model with every finished blend replaced by its new norm, parameters under their old names.

    ValueError where nothing blends, or where a blend has not run its steps, unless `early=True`.

    >>> model = blend(nn.Sequential(nn.LayerNorm(4)), "un", steps=1)
    >>> _ = model(torch.randn(8, 4))
    >>> settle(model)[0]
    UN(4, un)
    """
    refuse_wrapped(model, "settle")
    model = model if inplace else copy_model(model)
    blends = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, Blend)}
    if not blends:
        raise ValueError(f"settle() found nothing that blends; the norms are {', '.join(find(model)) or 'none'}")
    if early is False and (waiting := {name: m for name, m in blends.items() if not m.done}):
        name, first = next(iter(waiting.items()))
        raise ValueError(
            f"{len(waiting)} of {len(blends)} blends are not done: {name} has made {int(first.step)} of {first.steps} "
            "training forwards; train on, or pass early=True"
        )
    made = {id(m): m.settled() for m in blends.values()}
    for name, old in blends.items():
        model = put(model, name, made[id(old)])
    record_changes(model)
    return model


def _blended(old: nn.Module, spec: str, steps: int, schedule: Schedule, like: Tensor | None) -> Blend:
    """The blend of a norm of the model into a new one, with the old one's parameters, hooks and mode."""
    new = replacement(old, spec, like)
    own = {id(p): p for p in (new.weight, new.bias) if p is not None}
    if isinstance(old, Norm):
        new, fading = (copy.deepcopy(norm, dict(own)) for norm in (new, old))
    else:
        found = read(old)
        fading = equivalent(found)
        fading = fading if like is None or found.weight is not None else fading.to(like.device, like.dtype)
        for key in ("weight", "bias"):
            mine, theirs = getattr(new, key), getattr(fading, key)
            if mine is not None and theirs is not None and mine.shape == theirs.shape:
                setattr(fading, key, mine)
    both = Blend(fading, new, steps=steps, schedule=schedule)
    both.step = both.step.to(next((t.device for t in (*new.parameters(), *new.buffers())), both.step.device))
    for hooks in HOOKS:
        setattr(both, hooks, getattr(new, hooks))
        for norm in (fading, new):
            setattr(norm, hooks, collections.OrderedDict())
    if getattr(new, "channel_dim", -1) != -1:
        both.channel_dim = 1  # type: ignore[assignment]
    return both.train(old.training)
