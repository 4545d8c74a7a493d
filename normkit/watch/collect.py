"""Samples: statistics gathered at a norm in one step, and their evaluation."""

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels import ops, sync
from normkit.kernels.rule import usable
from normkit.norms import PowerNorm, StatNorm
from normkit.norms._warmup import NOTICE, WarmupNorm
from normkit.norms.un import UN
from normkit.watch.quantities import QUARTILES, Quantity
from normkit.watch.rows import Waiting
from normkit.watch.sites import Site

Fields = dict[str, Tensor]
Moments = tuple[Tensor, Tensor, Tensor]  # mean and variance `[C]` of the real rows of an input, and their count
WINDOW = 32  # samples of which the normality of a channel is tested
KEEP = 0.9  # weight of the old value in the averages that the recorder keeps
FORGET = 0.98  # weight of the past: about the last 50 samples count
LEAST = 3  # samples from which on there is a share


class Sample(NamedTuple):
    """Statistics of one norm at one step, by name; `quantities` lists the names."""

    step: int
    site: Site
    fields: Fields


class Memory:
    """State of the recorder at one norm: averages and last values."""

    def __init__(self) -> None:
        self.running: Tensor | None = None  # [k, C], of the statistics that the norm does not keep itself
        self.samples = 0
        self.rings: dict[str, Tensor] = {}  # side -> [WINDOW, C], where windows are recorded
        self.channels: dict[str, list[Tensor]] = {"x": [], "g": []}  # side -> last values of the first channel
        self.counts = {"x": 0, "g": 0}
        self.zero: dict[str, Tensor] = {}  # side -> [C], channels that were zero in all samples
        self.share = LengthShare()

    def average(self, batch: Fields, count: Tensor) -> Fields:
        """Update the averages with a usable batch; return those before it, empty at first."""
        new = torch.stack(list(batch.values()))
        if self.running is None or self.running.shape != new.shape:  # what has no size of its own takes others
            self.running, self.samples, self.share = torch.full_like(new, torch.nan), 0, LengthShare()
        old = self.running.to(new)  # of the type before, where a model changes it
        weight = max(1 / (self.samples + 1), 1 - KEEP)  # a plain average first
        self.running = torch.where(usable(new, count), torch.where(old.isnan(), new, old.lerp(new, weight)), old)
        self.samples += 1
        return {f"running_{name}": value for name, value in zip(batch, old, strict=True)} if self.samples > 1 else {}

    def always_zero(self, side: str, quadratic: Tensor, count: Tensor | float = 1.0) -> Tensor:
        """Return `[C]`, True where mean squares `[C]` of one side have been zero in all samples."""
        zero = (quadratic == 0) | (torch.as_tensor(count) == 0)
        before = self.zero.get(side, zero).to(zero.device)
        self.zero[side] = zero & before if before.shape == zero.shape else zero
        return self.zero[side]

    def windows(self, side: str, value: Tensor, needs: Collection[str], last: int) -> Fields:
        """Store `value [C]`, of inputs ("x") or gradients ("g"), for the windows that are needed.

        Return the last values of the first channel, and the window `[WINDOW, C]` whenever it is full of new values.
        """
        found = {}
        if (name := f"channel_{side}") in needs:
            self.channels[side] = [*self.channels[side], value[0]][-last:]
            found[name] = torch.stack(self.channels[side])
        if (name := f"window_{side}") in needs:
            ring = self.rings.get(side, value[:0])
            if ring.shape[-1] != len(value):
                ring, self.counts[side] = value.new_zeros(WINDOW, len(value)), 0
            slot = self.counts[side] % WINDOW
            self.rings[side] = ring = torch.cat([ring[:slot], value[None], ring[slot + 1 :]])
            self.counts[side] += 1
            if slot == WINDOW - 1:
                found[name] = ring
        return found

    def state(self) -> dict[str, object]:
        """The state for a checkpoint."""
        return {**vars(self), "share": dict(vars(self.share))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore from a checkpoint."""
        zero = state["zero"] if isinstance(state["zero"], dict) else {}  # of an earlier version
        vars(self).update({**state, "share": self.share, "zero": zero})
        vars(self.share).update(state["share"])


class LengthShare:
    """Regression of a norm's batch statistics on the batch length, over the samples of a run.

    It compares each sample with the one before, so that the drift of training cancels. The share is adjusted for
    chance, 0 on average if statistics and lengths are independent, and is 0 where all batches have one length.

    >>> share = LengthShare()
    >>> for number in range(50):
    ...     length, other = torch.tensor([float(number % 5)]), torch.tensor([float(number % 2)])
    ...     found = share.add(length, length * 3, other)
    >>> found.round(decimals=1).tolist()
    [1.0, 0.0]
    """

    def __init__(self) -> None:
        self.last: Tensor | None = None  # [1 + C + ...]: the length, then all statistics
        self.sums = torch.zeros(2, 1)  # of (change of length) * change, and of change ** 2
        self.count = 0.0

    def add(self, length: Tensor, *statistics: Tensor) -> Tensor | None:
        """Add a sample; return the share of each of `statistics`, None if there are too few."""
        new = torch.cat([length.reshape(1).to(statistics[0]), *statistics])
        if self.last is None:
            self.last, self.sums = new, new.new_zeros(2, len(new))
            return None
        change = new - self.last
        finite = torch.isfinite(change).all()
        added = torch.stack([change[0] * change, change.square()])
        self.sums = FORGET * self.sums + torch.where(finite, added, 0)
        self.last = torch.where(torch.isfinite(new).all(), new, self.last)
        self.count = FORGET * self.count + 1
        if self.count < LEAST - 1:
            return None
        tiny = torch.finfo(new.dtype).tiny
        products, squares = (part[1:].split([len(each) for each in statistics]) for part in self.sums)
        explained = torch.stack([part.square().sum() for part in products]) / self.sums[0, 0].clamp(min=tiny)
        share = explained / torch.stack([part.sum() for part in squares]).clamp(min=tiny)
        return (1 - (1 - share) * self.count / (self.count - 1)).clamp(min=0)


def batch_lengths(mask: Tensor | None, shape: torch.Size, like: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the real tokens per sequence along `axis` of `shape`."""
    axis = min(axis, max(len(shape) - 1, 0))
    if mask is None:
        return like.new_full((), math.prod([*shape[:axis], *shape[axis + 1 :]])), like.new_zeros(())
    lengths = torch.atleast_1d(mask).movedim(axis, 0).reshape(*shape[axis : axis + 1], -1).sum(-1).to(like)
    return lengths.mean(), lengths.std(correction=0)


def moments(x: Tensor, mask: Tensor | None, module: object) -> Moments:
    """Moments of the real rows of `x[..., C]`; global with `sync`."""
    batch, count = ops.moments(x, mask, center=True)
    if groups := sync.groups_of(getattr(module, "sync", False)):
        batch, count = sync.join_processes(batch, count, groups)
    return batch[0], batch[1], count


def gather(site: Site, memory: Memory, x: Tensor, mask: Tensor | None, real: Tensor | None) -> Fields:
    """Gather statistics of an input `x[..., C]` of a norm, and the norm's own state."""
    module, own = site.module, site.running()
    half = x.dtype is torch.float16 or (
        torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type) is torch.float16
    )
    if isinstance(module, StatNorm):
        x = module.rest(x)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    mean, var, count = moments(x, mask, module)
    batch = {"mean": mean, "var": var, "quadratic": var + mean.square()}
    fields = {**batch, **memory.average({k: v for k, v in batch.items() if f"running_{k}" not in own}, count), **own}
    tokens = mask if real is None else real
    fields["length"], fields["length_spread"] = batch_lengths(tokens, x.shape[:-1], mean, site.batch_axis)
    sigma = (var + site.eps).sqrt()
    moved = torch.cat([mean / sigma, sigma.log()]), (batch["quadratic"] + site.eps).log() / 2
    if (share := memory.share.add(fields["length"], *moved)) is not None:
        fields["share_batch"], fields["share_quadratic"] = share.unbind()
    kept = x if mask is None else torch.where(mask[..., None], x, 0)
    low, high = torch.aminmax(kept)
    fields["largest"] = torch.maximum(-low, high)
    if half:
        fields["infinite"] = torch.isinf(kept).sum()
    fields["count"] = count
    fields["zero"] = memory.always_zero("x", batch["quadratic"], count).sum()
    energy = kept.square().mean(-1)
    rows = energy.numel() if mask is None else mask.sum().clamp(min=1)  # `count` may be of all processes
    fields["token_share"] = energy.sum().square() / energy.square().sum() / rows
    median = (energy if mask is None else torch.where(mask, energy, torch.nan)).nanmedian()
    fields["typical_token"] = median / (energy.sum() / rows)
    fields["largest_token"] = (energy.max() / median).sqrt()
    if energy.dim() > 1:
        sequences = energy.movedim(site.batch_axis, 0).flatten(1)
        fields["largest_token_place"] = sequences.argmax() % sequences.shape[1]
    if (alike := similarity(x, tokens, site.batch_axis)) is not None:
        fields["similarity"] = alike
    if tokens is not None:
        padded = ~tokens if mask is None else mask & ~tokens
        fields["padding"] = padded.sum() / rows
    if site.weight is not None:
        fields["weight"] = site.weight.to(x.dtype, copy=True)  # evaluated after the optimizer's step
    if isinstance(module, StatNorm):
        fields |= _state(module, fields)
    return fields


def similarity(x: Tensor, mask: Tensor | None, axis: int = 0) -> Tensor | None:
    """Return the mean cosine between two tokens of one sequence of `x[..., C]`; None without sequences.

    Args:
        x: An input of a norm.
        mask: True for real tokens, `x.shape[:-1]`.
        axis: The axis of the sequences in a batch.

    >>> similarity(torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[1.0, 0.0], [0.0, 3.0]]]), None)
    tensor(0.5000)
    """
    if x.dim() < 3 or not x.numel():
        return None
    x = x.movedim(axis, 0).flatten(1, -2)
    units = torch.nn.functional.normalize(x, dim=-1)
    real = torch.ones_like(x[..., 0], dtype=torch.bool) if mask is None else mask.movedim(axis, 0).flatten(1)
    count = real.sum(1)
    total = torch.where(real[..., None], units, 0).sum(1).square().sum(-1)  # each token with itself gives 1
    cosine, several = (total - count) / (count * (count - 1)).clamp(min=1), count > 1
    return torch.where(several, cosine, 0).sum() / several.sum()  # nan if no sequence has two tokens


def _state(norm: StatNorm, fields: Fields) -> Fields:
    """The state of a normkit norm before this batch."""
    found = {"skipped": norm.skipped.clone(), "skipped_grad": norm.skipped_grad.clone()}
    warmup = norm.end_of_warmup(norm) if isinstance(norm, WarmupNorm) else getattr(norm, "warmup", None)
    if warmup is not None:
        most = NOTICE if isinstance(warmup, Tensor) else None  # with "auto" the end is not known before
        warmup, window = torch.as_tensor(warmup), getattr(norm, "window", 0)
        warmup = (warmup - 1).clamp(min=window) if window else warmup  # a window is used once it is full
        found["warmup_left"] = (warmup - norm.step).clamp(min=0, max=most)
    if isinstance(norm, PowerNorm):
        batch, running = fields["quadratic"], fields["running_quadratic"]
        used = torch.where(norm.step < norm.end_of_warmup(norm), batch, running)
        found["nu"] = norm.nu[0].clone()
        found["Gamma"] = batch / (used + norm.eps)
        found["Gamma_bound"] = batch.new_full((), 2 / (1 - norm.alpha_bkw))
    if isinstance(norm, UN) and norm.outlier_filtration:
        found["filtered"] = norm.filtered.clone()
        found["smoothed"] = norm.step - torch.as_tensor(warmup)
    return found


def gather_gradient(site: Site, x: Tensor, dy: Tensor, mask: Tensor | None, known: Moments | None) -> Fields:
    """Gather statistics of the gradient `dy` of an output; `known` are the moments of `x`."""
    if isinstance(site.module, StatNorm):
        x = site.module.rest(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    x, dy = x.to(wide), dy.to(wide)
    mean, var, count = moments(x, mask, site.module) if known is None else known
    x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    if mask is not None:
        keep = mask.reshape(-1, 1)
        x, dy = torch.where(keep, x, 0), torch.where(keep, dy, 0)
    sums = torch.stack([dy.sum(0), (dy * x).sum(0), dy.square().sum(0)])
    sums = sync.all_reduce(sums, sync.groups_of(getattr(site.module, "sync", False)))
    s0, sx, square = sums / count.clamp(min=1)
    psi = torch.sqrt(var + mean.square() + site.eps)
    gain = {} if site.weight is None else {"gain": site.weight.to(wide, copy=True)}
    gamma = gain.get("gain", 1)
    return {"g_mu": gamma * s0, "g_psi2": gamma * sx / psi, "at_mean": mean, "at_var": var, "at_psi": psi,
            "dy_square": square, **gain}  # fmt: skip


def evaluate(samples: list[Sample], chosen: Mapping[str, Quantity]) -> list[Waiting]:
    """Compute the chosen quantities of each sample.

    Samples with the same statistics in the same shapes are stacked, so that many norms cost as much as one.
    """
    needs = {need for quantity in chosen.values() for need in quantity.needs}
    groups: dict[object, list[int]] = {}  # numbers of samples
    for place, (_, site, fields) in enumerate(samples):
        key = (site.eps, *((name, tuple(value.shape), value.device) for name, value in fields.items()))
        groups.setdefault(key, []).append(place)
    found = {}
    for places in groups.values():
        group = [samples[place] for place in places]
        fields = {name: torch.stack([sample.fields[name] for sample in group]) for name in group[0].fields}
        fields |= _derived(fields, group[0].site.eps, needs)
        names = [name for name, quantity in chosen.items() if set(quantity.needs) <= fields.keys()]
        if names:
            wide = torch.float64 if any(v.dtype is torch.float64 for v in fields.values()) else torch.float32
            values = [chosen[name].function(*(fields[need] for need in chosen[name].needs)) for name in names]
            table = torch.stack([value.to(wide) for value in values], dim=1)
            for place, (step, site, _), row in zip(places, group, table, strict=True):
                found[place] = Waiting(step, site.name, site.norm, names, row)
    return [found[place] for place in sorted(found)]


def _derived(fields: Fields, eps: float, needs: set[str]) -> Fields:
    """Statistics derived from those of stacked norms: roots and products."""
    names = {"sigma": "var", "psi": "quadratic", "running_sigma": "running_var", "running_psi": "running_quadratic"}
    found = {root: torch.sqrt(fields[square] + eps) for root, square in names.items() if square in fields}
    if "spread" in needs and "weight" in fields:
        ratio = fields["weight"].abs() / found["psi"]
        # one by one: a list of shares would be copied to the GPU, for which the host waits
        found["spread"] = torch.stack([torch.quantile(ratio, share, dim=-1) for share, _ in QUARTILES.values()])
    if "at_psi" in fields:
        g_mu, g_psi2, psi = (fields[name] for name in ("g_mu", "g_psi2", "at_psi"))
        found["g_sigma2"] = (g_psi2 * psi - fields["at_mean"] * g_mu) / torch.sqrt(fields["at_var"] + eps)
        along, gain = (g_psi2 / psi).square(), fields.get("gain", 1.0) / psi
        found["dx_square"] = gain.square() * fields["dy_square"] - along
    return found
