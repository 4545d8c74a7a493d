"""Find tokens that are much larger than others, and clamp them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.models import find
from normkit.models.first_token import Clamp
from normkit.models.invoke import Forward, call, seen
from normkit.norms import StatNorm

LARGE = 6.0  # root mean square of a large token, by the median of all
USUAL = 2.0  # that of a usual one, at most


class LargeToken(NamedTuple):
    """A first token that is larger than others."""

    norm: str  # name of the first norm at which it is large
    ratio: float  # its root mean square by the median of other tokens, at the norm where this is largest


class Bounded(nn.Sequential):
    """A norm, and a clamp of what it returns."""


@torch.no_grad()
def large_first_token(model: nn.Module, batches: Sequence[Any], forward: Forward | None = None) -> LargeToken | None:
    """Find whether the first tokens `[:, 0]` of texts are large at some norm; return None if not."""
    ratios: dict[str, float] = {}

    def see(name: str, x: Tensor, mask: Tensor | None, y: Tensor) -> None:
        sizes = _sizes(x)
        ratio = float(sizes[:, 0].median() / sizes[:, 1:].median())
        ratios[name] = max(ratio, ratios.get(name, 0.0))

    with seen(model, find(model), see):
        for batch in batches:
            call(model, batch, forward)
    large = [name for name, ratio in ratios.items() if ratio > LARGE]
    return LargeToken(large[0], max(ratios.values())) if large else None


@torch.no_grad()
def clamp_writers(model: nn.Module, batches: Sequence[Any], forward: Forward | None = None) -> list[str]:
    """Clamp, in place, the linear layers that write large tokens, to what they write for usual ones.

    Such a layer is the last one before a norm at which a token is above 6 times the median, where none was at the norm
    before. Every layer behind reads usual tokens then.

    Returns:
        The names of the layers.
    """
    found: dict[str, Tensor] = {}
    last: list[Any] = ["", None, False]  # layer, what it wrote, whether tokens were large before

    def write(name: str, x: Tensor, mask: Tensor | None, y: Tensor) -> None:
        last[:2] = name, y

    def see(_: str, x: Tensor, mask: Tensor | None, __: Tensor) -> None:
        name, y, was = last
        sizes = _sizes(x)
        last[2] = bool(sizes.max() > LARGE * sizes.median())
        if last[2] and not was and name and y.shape == x.shape:
            found[name] = _join(found.get(name), y[sizes < USUAL * sizes.median()])

    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}
    with seen(model, layers, write), seen(model, find(model), see):
        for batch in batches:
            last[:] = "", None, False
            call(model, batch, forward)
    for name, bounds in found.items():
        model.set_submodule(name, nn.Sequential(layers[name], _clamp(bounds)).eval())
    return [*found]


@torch.no_grad()
def add_clamps(model: nn.Module, batches: Sequence[Any], forward: Forward | None = None) -> None:
    """Put a clamp behind each norm, in place, with the range of what the norm returns on the batches."""
    found: dict[str, Tensor] = {}

    def see(name: str, x: Tensor, mask: Tensor | None, y: Tensor) -> None:
        found[name] = _join(found.get(name), y.flatten(0, -2))

    with seen(model, find(model), see):
        for batch in batches:
            call(model, batch, forward)
    for name, bounds in found.items():
        model.set_submodule(name, Bounded(model.get_submodule(name), _clamp(bounds)).eval())


@torch.no_grad()
def clamps_first(model: nn.Module) -> None:
    """Put each clamp before its norm, in place; drop those of norms that compute statistics."""
    for name, module in [*model.named_modules()]:
        if not isinstance(module, Bounded):
            continue
        norm, clamp = module
        assert isinstance(clamp, Clamp)
        if isinstance(norm, StatNorm):
            shift = norm(torch.zeros_like(clamp.low)[None])[0].double()
            scale = norm(torch.ones_like(clamp.low)[None])[0].double() - shift
            ends = torch.stack([(each.double() - shift) / scale for each in (clamp.low, clamp.high)])
            low, high = (each.to(clamp.low) for each in (ends.amin(0), ends.amax(0)))
            fixed = scale == 0
            clamp.low.copy_(low.masked_fill(fixed, -torch.inf))
            clamp.high.copy_(high.masked_fill(fixed, torch.inf))
            model.set_submodule(name, nn.Sequential(clamp, norm).eval())
        else:
            model.set_submodule(name, norm)


def place_of(model: nn.Module, norm: str) -> str:
    """Return the name of what stands in a norm's place in the architecture: the norm, or it and its clamp."""
    owner = norm.rpartition(".")[0]
    return owner if isinstance(model.get_submodule(owner), Bounded) else norm


def _sizes(x: Tensor) -> Tensor:
    return x.float().square().mean(-1).sqrt()


def _join(old: Tensor | None, rows: Tensor) -> Tensor:
    """Return lowest and highest value of each channel, `[2, channels]`, also of the rows before."""
    new = torch.stack([rows.amin(0), rows.amax(0)])
    return new if old is None else torch.stack([torch.minimum(old[0], new[0]), torch.maximum(old[1], new[1])])


def _clamp(bounds: Tensor) -> Clamp:
    clamp = Clamp(bounds.shape[1]).to(bounds)
    clamp.low.copy_(bounds[0])
    clamp.high.copy_(bounds[1])
    return clamp
