"""Samples: statistics gathered at a norm in one step, and their evaluation."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from normkit.kernels import ops, sync
from normkit.kernels.rule import NOTICE, usable
from normkit.norms import PowerNorm, StatNorm
from normkit.norms._warmup import WarmupNorm
from normkit.norms.un import UN
from normkit.watch.length import LengthShare, batch_lengths
from normkit.watch.quantities import QUARTILES, Quantity
from normkit.watch.rows import Waiting
from normkit.watch.sites import Site

Fields = dict[str, Tensor]
Moments = tuple[Tensor, Tensor, Tensor]  # mean and variance `[C]` of the real rows of an input, and their count
WINDOW = 32  # samples of which the normality of a channel is tested


class Sample(NamedTuple):
    """Statistics of one norm at one step, by name; `quantities` lists the names."""

    step: int
    site: Site
    fields: Fields


STATE = {"running": "running", "looks": "samples", "rings": "rings", "channels": "channels", "seen": "counts"}
"""Attribute of `Memory` by its name in checkpoints."""


class Memory:
    """State of the recorder at one norm: averages and last values."""

    def __init__(self, alpha: float, channel: int):
        self.alpha = alpha  # weight of the old average
        self.channel = channel  # that is followed by itself
        self.running: Tensor | None = None  # [k, C], of the statistics that the norm does not keep itself
        self.samples = 0
        self.rings: dict[str, Tensor] = {}  # side -> [WINDOW, C], where windows are recorded
        self.channels: dict[str, list[Tensor]] = {"x": [], "g": []}  # side -> last values of one channel
        self.counts = {"x": 0, "g": 0}
        self.share = LengthShare()

    def average(self, batch: Fields, count: Tensor) -> Fields:
        """Update the averages with a usable batch; return those before it, empty at first."""
        new = torch.stack(list(batch.values()))
        if self.running is None or self.running.shape != new.shape:  # what has no size of its own takes others
            self.running, self.samples, self.share = torch.full_like(new, torch.nan), 0, LengthShare()
        old = self.running.to(new)  # of the type before, where a model changes it
        weight = max(1 / (self.samples + 1), 1 - self.alpha)  # a plain average first
        self.running = torch.where(usable(new, count), torch.where(old.isnan(), new, old.lerp(new, weight)), old)
        self.samples += 1
        return {f"running_{name}": value for name, value in zip(batch, old, strict=True)} if self.samples > 1 else {}

    def windows(self, side: str, value: Tensor, needs: Collection[str], last: int) -> Fields:
        """Store `value [C]`, of inputs ("x") or gradients ("g"), for the windows that are needed.

        Return the last values of one channel, and the window `[WINDOW, C]` whenever it is full of new values.
        """
        found = {}
        if (name := f"channel_{side}") in needs:
            self.channels[side] = [*self.channels[side], value[self.channel % len(value)]][-last:]
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
        return {**{name: getattr(self, attribute) for name, attribute in STATE.items()}, "share": vars(self.share)}

    def load(self, state: Mapping[str, object]) -> None:
        """Restore from a checkpoint."""
        for name, attribute in STATE.items():
            setattr(self, attribute, state[name])
        vars(self.share).update(state.get("share", {}))  # type: ignore[call-overload]


def moments(x: Tensor, mask: Tensor | None, module: object) -> Moments:
    """Moments of the real rows of `x[..., C]`; global with `sync`."""
    batch, count = ops.moments(x, mask, center=True)
    if groups := sync.groups_of(getattr(module, "sync", False)):
        batch, count = sync.join_processes(batch, count, groups)
    return batch[0], batch[1], count


def gather(site: Site, memory: Memory, x: Tensor, mask: Tensor | None, real: Tensor | None) -> Fields:
    """Gather statistics of an input `x[..., C]` of a norm, and the norm's own state."""
    module, own = site.module, site.running()
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
    fields["count"] = count
    energy = kept.square().mean(-1)
    rows = energy.numel() if mask is None else mask.sum().clamp(min=1)  # `count` may be of all processes
    fields["token_share"] = energy.sum().square() / energy.square().sum() / rows
    real = mask if real is None else real
    if real is not None:
        padded = ~real if mask is None else mask & ~real
        fields["padding"] = padded.sum() / rows
    if site.weight is not None:
        fields["weight"] = site.weight.to(x.dtype, copy=True)  # evaluated after the optimizer's step
    if isinstance(module, StatNorm):
        fields |= _state(module, fields)
    return fields


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
