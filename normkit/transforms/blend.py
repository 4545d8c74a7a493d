"""Replace norms gradually during training."""

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
    """Weighted mean of two norms: `y = share * old(x) + (1 - share) * new(x)`.

    Gain and bias belong to both norms. A parameter that only the old norm has, such as ScaleNorm's length, disappears
    with it. In the k-th training forward `share` is `1 - k / steps`. The count is the buffer `step`, which is part of
    checkpoints; a recomputed forward (activation checkpointing) does not count. At inference the share stays, and the
    new norm uses its running statistics.

    Args:
        old: Norm to replace.
        new: Norm that replaces it, with the same parameters.
        steps: Training forwards until only the new norm acts.
        schedule: "linear", or "cosine" for a slower start and end.
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
        self.shared = [  # parameters belong to this module, so that their names stay
            (name, key)
            for name, norm in (("old", old), ("new", new))
            for key in ("weight", "bias")
            if getattr(self, key) is not None and getattr(norm, key) is getattr(self, key)
        ]
        for name, key in self.shared:
            delattr(getattr(self, name), key)
        self._share_parameters()

    def _share_parameters(self) -> None:
        """Give both norms the current gain and bias, which wrappers and loaders may replace."""
        for name, key in self.shared:
            object.__setattr__(getattr(self, name), key, getattr(self, key))

    @property
    def offline(self) -> bool:  # type: ignore[override]
        """True if the new norm has frozen statistics at inference."""
        return self.new.offline

    @property
    def spec(self) -> str:
        """Specs of both norms and the steps; `make` does not read it."""
        return f"blend({self.old.spec}, {self.new.spec}, steps={self.steps})"

    def share(self) -> Tensor:
        """Return the current weight of the old norm, from 1 to 0."""
        left = (1 - self.step / self.steps).clamp(min=0)
        return left if self.schedule == "linear" else (1 - torch.cos(torch.pi * left)) / 2

    @property
    def done(self) -> bool:
        """True once only the new norm acts. Waits for the device."""
        return int(self.step) >= self.steps

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Blend the outputs of both norms, and count the step while training."""
        mask = self.mask if mask is None else mask
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        if self.training and not recomputed:
            self.step.add_(1)
        share = self.share().to(x.dtype)
        if torch.compiler.is_compiling():
            (share,) = autograd.snapshot([share])  # a compiled backward would use the share of the next step
        self._share_parameters()
        return self.new(x, mask).lerp(self.old(x, mask), share)

    def finalize(self) -> Norm:
        """Return the new norm alone, with gain, bias, hooks and mode of the blend."""
        kept = {id(tensor): tensor for tensor in (*self.parameters(), *self.new.buffers())}
        new = copy.deepcopy(self.new, kept)
        new.weight, new.bias = self.weight, self.bias
        for hooks in HOOKS:
            setattr(new, hooks, getattr(self, hooks))
        if hasattr(self, "channel_dim"):
            new.channel_dim = self.channel_dim  # type: ignore[assignment]
        return new.train(self.training)

    def split(self) -> Split:
        """Split the new norm; raises a ValueError while the old one still acts."""
        if not self.done:
            left = f"{int(self.step)} of {self.steps} training forwards done"
            raise ValueError(f"a blend has no split before its end ({left}); train on, then settle(model)")
        return self.finalize().eval().split()

    def extra_repr(self) -> str:
        """Show size, progress and schedule."""
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
    """Replace the norms of a model gradually, over `steps` training forwards.

    At first each norm computes what it did before, at the end what the new one does (progressive re-parametrization,
    SLAB, arXiv:2405.11582). Gain and bias keep their names and belong to both norms. The new norm gathers its
    statistics from the first step. Train as usual, then call `settle(model)`.

    Args:
        model: Any PyTorch model that is not wrapped, compiled or quantized.
        to: A spec, or rules from patterns of names to specs, as in `convert`.
        steps: Training forwards until only the new norms act; about 60 % of a fine-tuning worked well.
        schedule: "linear", or "cosine" for a slower start and end.
        where: As in `convert`.
        mask_from: As in `convert`.
        inplace: Change the given model. By default it is copied.

    Returns:
        The model with a `Blend` in place of each norm.

    Raises:
        ValueError: If nothing was found, or an argument is wrong.
        TypeError: If the model is wrapped, compiled or quantized.

    Example:
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
    """Replace each finished blend by its new norm; parameters get their old names.

    Args:
        model: Model after `blend` and `steps` training forwards.
        early: Also replace blends that are not finished, which changes the output.
        inplace: Change the given model. By default it is copied.

    Returns:
        The model with ordinary norms.

    Raises:
        ValueError: If the model has no blends, or one is not finished and `early` is False.

    Example:
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
    made = {id(m): m.finalize() for m in blends.values()}
    for name, old in blends.items():
        model = put(model, name, made[id(old)])
    record_changes(model)
    return model


def _blended(old: nn.Module, spec: str, steps: int, schedule: Schedule, like: Tensor | None) -> Blend:
    """Build the blend of a norm of the model into a new one."""
    new = replacement(old, spec, like)
    own = {id(p): p for p in (new.weight, new.bias) if p is not None}
    if isinstance(old, Norm):
        new, outgoing = (copy.deepcopy(norm, dict(own)) for norm in (new, old))
    else:
        found = read(old)
        outgoing = equivalent(found)
        outgoing = outgoing if like is None or found.weight is not None else outgoing.to(like.device, like.dtype)
        for key in ("weight", "bias"):
            mine, theirs = getattr(new, key), getattr(outgoing, key)
            if mine is not None and theirs is not None and mine.shape == theirs.shape:
                setattr(outgoing, key, mine)
    both = Blend(outgoing, new, steps=steps, schedule=schedule)
    both.step = both.step.to(next((t.device for t in (*new.parameters(), *new.buffers())), both.step.device))
    for hooks in HOOKS:
        setattr(both, hooks, getattr(new, hooks))
        for norm in (outgoing, new):
            setattr(norm, hooks, collections.OrderedDict())
    if getattr(new, "channel_dim", -1) != -1:
        both.channel_dim = 1  # type: ignore[assignment]
    return both.train(old.training)
