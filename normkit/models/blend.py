"""Replace norms gradually during training, all at once or site by site."""

import copy
import fnmatch
import re
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from normkit._util import is_int, require, require_flags
from normkit.kernels import autograd
from normkit.models.checks import check_not_meta, check_not_wrapped, copy_unless
from normkit.models.convert import Specs, Where, chosen_sites, find, replace_all, replacement
from normkit.models.hooks import copy_without_hooks
from normkit.models.masks import MaskFrom
from normkit.models.third_party import read_norm
from normkit.norms import Norm, Split
from normkit.norms._recompute import is_recomputed

Schedule = Literal["linear", "cosine"]


class Blend(Norm):
    """Weighted mean of two norms: `y = share * old(x) + (1 - share) * new(x)`.

    Gain and bias belong to both norms. A parameter that only the old norm has, such as ScaleNorm's length, disappears
    with it. In the k-th training forward `share` is `1 - (k - start) / steps`, within 0 and 1. The count is the buffer
    `step`, which is part of checkpoints; a recomputed forward (activation checkpointing) does not count. At inference
    the share stays, and the new norm uses its running statistics.

    Args:
        old: Norm to replace.
        new: Norm that replaces it, with the same parameters.
        steps: Training forwards from `start` until only the new norm acts.
        schedule: "linear", or "cosine" for a slower start and end.
        start: Training forwards in which only the old norm acts.
        first_start: The same for the first token of each sequence, `x[:, 0]`, which takes no part in the new norm's
            statistics until then; None for no distinction.
        frozen: The old norm keeps its running statistics while it trains, as torchvision's FrozenBatchNorm2d.
    """

    batch_free = False
    old: Norm
    new: Norm
    step: Tensor

    def __init__(
        self, old: Norm, new: Norm, *, steps: int, schedule: Schedule = "linear", start: int = 0,
        first_start: int | None = None, frozen: bool = False,
    ):  # fmt: skip
        super().__init__(new.dim, eps=new.eps, affine=False)
        self.old, self.new, self.steps, self.schedule = old, new, steps, schedule
        self.start, self.first_start, self.frozen = start, first_start, frozen
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

    def train(self, mode: bool = True) -> "Blend":
        """Set the mode of both norms; a frozen one stays in evaluation mode."""
        super().train(mode)
        self.old.train(mode and not self.frozen)
        return self

    def share(self, start: int | None = None) -> Tensor:
        """Return the weight of the old norm, from 1 to 0, of a schedule from `start` on."""
        left = (1 - (self.step - (self.start if start is None else start)) / self.steps).clamp(0, 1)
        return left if self.schedule == "linear" else (1 - torch.cos(torch.pi * left)) / 2

    @property
    def end(self) -> int:
        """Training forwards until only the new norm acts, on all tokens."""
        return max(self.start, self.first_start or 0) + self.steps

    @property
    def done(self) -> bool:
        """True once only the new norm acts. Waits for the device."""
        return int(self.step) >= self.end

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Blend the outputs of both norms, and count the step while training."""
        mask = self.mask if mask is None else mask
        if self.training and not is_recomputed():
            self.step.add_(1)
        share = self.share().to(x.dtype)
        if self.first_start is not None:
            if x.dim() != 3:
                raise ValueError(f"first tokens are x[:, 0] of [batch, time, channels]; got shape {tuple(x.shape)}")
            is_first = (torch.arange(x.shape[1], device=x.device) == 0)[:, None]
            first = self.share(self.first_start).to(x.dtype)
            share = torch.where(is_first, first, share)
            counts = (~is_first[:, 0] | (first == 0)).expand(x.shape[:2])
            mask = counts if mask is None else mask & counts
        if torch.compiler.is_compiling() and torch.is_grad_enabled():
            (share,) = autograd.snapshot([share])  # a compiled backward would use the share of the next step
        self._share_parameters()
        return self.new(x, mask).lerp(self.old(x, mask), share)

    def finalize(self) -> Norm:
        """Return the new norm alone, with gain, bias and mode of the blend."""
        kept = {id(tensor): tensor for tensor in (*self.parameters(), *self.new.buffers())}
        new = copy.deepcopy(self.new, kept)
        new.weight, new.bias = self.weight, self.bias
        new.channel_dim = self.channel_dim
        return new.train(self.training)

    def split(self) -> Split:
        """Split the new norm; raises a ValueError while the old one still acts."""
        if not self.done:
            left = f"{int(self.step)} of {self.end} training forwards done"
            raise ValueError(f"a blend has no split before its end ({left}); train on, then settle(model)")
        return self.finalize().eval().split()

    def extra_repr(self) -> str:
        """Show size, progress and schedule."""
        step = "?" if self.step.is_meta else int(self.step)
        return f"{self.dim}, step={step} of {self.end}, schedule={self.schedule!r}"


def blend(
    model: nn.Module,
    to: Specs,
    steps: int,
    *,
    schedule: Schedule = "linear",
    gap: int = 0,
    order: Sequence[str] | None = None,
    first_last: bool = False,
    where: Where | None = None,
    mask_from: MaskFrom = None,
    inplace: bool = False,
) -> nn.Module:
    """Replace the norms of a model gradually, over `steps` training forwards each.

    At first each norm computes what it did before, at the end what the new one does (progressive re-parametrization,
    SLAB, arXiv:2405.11582). Gain and bias keep their names and belong to both norms. The new norm gathers its
    statistics from the first step. Train as usual, then call `settle(model)`. With checkpointing of activations, run
    the backward pass of a forward before the next forward: what is recomputed takes the share of the present step.

    With a `gap`, one site after the other begins (Heimersheim 2024, arXiv:2409.13710): the last is done after
    `gap * (sites - 1) + steps` training forwards. `steps=1` replaces each at once.

    Args:
        model: Any PyTorch model that is not wrapped, compiled or quantized.
        to: A spec, or rules from patterns of names to specs, as in `convert`.
        steps: Training forwards of each site until only the new norm acts.
        schedule: "linear", or "cosine" for a slower start and end.
        gap: Training forwards between the starts of successive sites; 0 starts all at once.
        order: Patterns of names, first to last; a site's place is that of the first that matches. By default the
            norms of repeated blocks come first, each block's last norm before its others (in pre-norm models: before
            the MLPs, then before attention). Norms outside of blocks, such as the final one, come last.
        first_last: Replace the norms on the first token of each sequence `[batch, time, channels]` after all sites, as
            it often has far larger activations. Until then new norms leave it out of their statistics.
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
    for name, value, least in (("steps", steps, 1), ("gap", gap, 0)):
        require(is_int(value) and value >= least, name, value, f"a whole number of at least {least}")
    require(schedule in ("linear", "cosine"), "schedule", schedule, '"linear" or "cosine"')
    names = order is None or (isinstance(order, list | tuple) and all(isinstance(each, str) for each in order))
    require(names, "order", order, "a list of patterns of names, first to last")
    require_flags(first_last=first_last)
    chosen = chosen_sites(model, to, where, "blend")
    starts = {name: gap * place for place, name in enumerate(_in_order(list(chosen), order))}
    first_start = max(starts.values()) + steps if first_last else None
    model = copy_unless(inplace, model)
    like = next(model.parameters(), None)

    def blended(name: str, old: nn.Module) -> Blend:
        if isinstance(old, Blend):
            raise ValueError(f"{name} is a Blend, {old.spec}; call settle(model) before another blend()")
        when = {"steps": steps, "schedule": schedule, "start": starts[name], "first_start": first_start}
        return _blended(old, chosen[name], when, like)

    return replace_all(model, chosen, blended, mask_from)


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
    check_not_wrapped(model, "settle")
    require_flags(early=early)
    if not early:
        check_not_meta(model, "settle")
    model = copy_unless(inplace, model)
    blends = {name: m for name, m in model.named_modules(remove_duplicate=False) if isinstance(m, Blend)}
    if not blends:
        raise ValueError(f"settle() found nothing that blends; the norms are {', '.join(find(model)) or 'none'}")
    if not early and (waiting := {name: m for name, m in blends.items() if not m.done}):
        name, first = next(iter(waiting.items()))
        left = f"{name} has made {int(first.step)} of {first.end} training forwards"
        raise ValueError(f"{len(waiting)} of {len(blends)} blends are not done: {left}; train on, or pass early=True")
    return replace_all(model, blends, lambda name, old: old.finalize())


def _in_order(names: list[str], order: Sequence[str] | None) -> list[str]:
    """Sort names of sites.

    >>> _in_order(["h.0.ln_1", "h.0.ln_2", "h.1.ln_1", "h.1.ln_2", "ln_f"], None)
    ['h.0.ln_2', 'h.1.ln_2', 'h.0.ln_1', 'h.1.ln_1', 'ln_f']
    """
    if order is None:  # a family: the same site in all blocks
        family = {name: re.sub(r"(^|\.)\d+(\.|$)", r"\1*\2", name, count=1) for name in names}
        families = list(dict.fromkeys(family.values()))
        return sorted(names, key=lambda name: (family[name] == name, -families.index(family[name])))
    for pattern in order:
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"the pattern {pattern!r} of order matches no site; they are {', '.join(names)}")
    place = {name: [fnmatch.fnmatchcase(name, pattern) for pattern in order] for name in names}
    if left := [name for name in names if not any(place[name])]:
        raise ValueError(f"order leaves out {', '.join(left)}; add a pattern, '*' for the rest")
    return sorted(names, key=lambda name: place[name].index(True))


def _blended(old: nn.Module, spec: str, when: dict, like: Tensor | None) -> Blend:
    """Build the blend of a norm of the model into a new one."""
    new = replacement(old, spec, like)
    frozen = False
    own = {id(p): p for p in (new.weight, new.bias) if p is not None}
    if isinstance(old, Norm):
        new, outgoing = (copy_without_hooks(norm, dict(own)) for norm in (new, old))
    else:
        found = read_norm(old)
        outgoing = replacement(old, found.kind, like)
        frozen = found.running is not None and not hasattr(old, "momentum")  # nothing moves its statistics
        for key in ("weight", "bias"):
            mine, theirs = getattr(new, key), getattr(outgoing, key)
            if mine is not None and theirs is not None and mine.shape == theirs.shape:
                setattr(outgoing, key, mine)
    both = Blend(outgoing, new, frozen=frozen, **when)
    both.step = both.step.to(next((t.device for t in (*new.parameters(), *new.buffers())), both.step.device))
    both.channel_dim = new.channel_dim
    return both.train(old.training)
