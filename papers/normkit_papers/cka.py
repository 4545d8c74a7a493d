"""Similarity of layers, of one model or of two: centred kernel alignment (UN, Figure 6)."""

from collections.abc import Iterable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.models.calibrate import evaluating
from normkit.models.invoke import call
from normkit.watch.recording import Row
from normkit.watch.sites import sites


class LayerSimilarity(NamedTuple):
    """CKA of each layer of one model (down) with each layer of another (across)."""

    layers: tuple[str, ...]
    others: tuple[str, ...]
    values: Tensor

    def rows(self, step: int) -> list[Row]:
        """The values as rows of quantity "cka"; the site names both layers, "a|b"."""
        table = self.values.tolist()
        return [
            Row(step, f"{a}|{b}", "", "cka", value)
            for a, line in zip(self.layers, table, strict=True)
            for b, value in zip(self.others, line, strict=True)
        ]


def hsic(k: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    """Unbiased Hilbert-Schmidt independence criterion of kernels `[..., n, n]`, n >= 4.

    `(tr(KL) + 1'K1 1'L1 / ((n-1)(n-2)) - 2 1'KL1 / (n-2)) / (n(n-3))`, the diagonals taken as zero (Song et al. 2012;
    Nguyen, Raghu & Kornblith 2021, Eq. 3).
    """
    n = k.shape[-1]
    if n < 4:
        raise ValueError(f"the unbiased estimate takes batches of at least 4 examples; got {n}")
    eye = torch.eye(n, dtype=torch.bool, device=k.device)
    k, l = k.masked_fill(eye, 0), l.masked_fill(eye, 0)  # noqa: E741
    both = (k * l).sum((-2, -1))
    product = k.sum((-2, -1)) * l.sum((-2, -1)) / ((n - 1) * (n - 2))
    cross = (k.sum(-2) * l.sum(-1)).sum(-1) * 2 / (n - 2)
    return (both + product - cross) / (n * (n - 3))


@torch.no_grad()
def cka(
    model: nn.Module,
    batches: Iterable[Any],
    other: nn.Module | None = None,
    layers: str | Iterable[str] | None = None,
    other_layers: str | Iterable[str] | None = None,
) -> LayerSimilarity:
    """Compute linear CKA between the outputs of layers, of one model or of two.

    `CKA = sum_b HSIC(K, L) / sqrt(sum_b HSIC(K, K) sum_b HSIC(L, L))` with the unbiased HSIC of each minibatch, so
    that batches may be small (Nguyen et al. 2021; UN Fig. 6).

    Args:
        model: A model.
        batches: Arguments that the models are called with: a tensor, a tuple or a dictionary; examples come first.
        other: A second model; the first one is compared with itself without it.
        layers: Name patterns; by default the norms.
        other_layers: Name patterns for the second model; by default `layers`.

    Raises:
        ValueError: if a pattern fits no layer, or there are no batches.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    >>> cka(model, [torch.randn(8, 3, generator=torch.Generator().manual_seed(0))]).values.round(decimals=4).tolist()
    [[1.0]]
    """
    names = _names(model, layers)
    others = names if other is None else _names(other, layers if other_layers is None else other_layers)
    joint = own = other_own = torch.zeros(())
    for batch in batches:
        k = _kernels(model, names, batch)
        l = k if other is None else _kernels(other, others, batch)  # noqa: E741
        joint = joint + hsic(k[:, None], l[None])
        own, other_own = own + hsic(k, k), other_own + hsic(l, l)
    if joint.dim() == 0:
        raise ValueError("there are no batches to compare layers on")
    return LayerSimilarity(tuple(names), tuple(others), joint / (own[:, None] * other_own[None]).sqrt())


def _names(model: nn.Module, layers: str | Iterable[str] | None) -> list[str]:
    if layers is None:
        found = [site.name for site in sites(model)]
        if not found:
            raise ValueError("the model has no norms; name its layers")
        return found
    patterns = [layers] if isinstance(layers, str) else list(layers)
    found = [name for name, _ in model.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not found:
        raise ValueError(f"no layer is called {', '.join(patterns)}")
    return found


def _kernels(model: nn.Module, names: list[str], batch: Any) -> Tensor:
    """Gram matrices `[layers, n, n]` of the outputs of layers for a batch."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        y = y.flatten(1).double()  # large common parts cancel in the criterion
        y = y - y.mean(0)
        seen[name] = y @ y.T

    parts = dict(model.named_modules())
    with evaluating(model), ExitStack() as hooks:
        for name in names:
            hooks.enter_context(parts[name].register_forward_hook(partial(keep, name)))
        call(model, batch)
    if missing := [name for name in names if name not in seen]:
        raise ValueError(f"{missing[0]} is not run by the model's forward")
    return torch.stack([seen[name] for name in names])
