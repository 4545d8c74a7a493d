"""Similarity of the layers of two models: centred kernel alignment (UN, Figure 6)."""

from collections.abc import Iterable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.models.calibrate import evaluating
from normkit.models.invoke import call
from normkit.watch import Row


class LayerSimilarity(NamedTuple):
    """CKA of each layer of one model (down) with each layer of another (across)."""

    layers: tuple[str, ...]
    others: tuple[str, ...]
    values: Tensor

    def rows(self, step: int) -> list[Row]:
        """The values as rows of quantity "cka"; the site names both layers, "a|b"."""
        return [
            Row(step, f"{a}|{b}", "", "cka", value)
            for a, line in zip(self.layers, self.values.tolist(), strict=True)
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
def cka(model: nn.Module, other: nn.Module, batches: Iterable[Any], layers: Iterable[str]) -> LayerSimilarity:
    """Compute linear CKA between the outputs of layers of two models.

    `CKA = sum_b HSIC(K, L) / sqrt(sum_b HSIC(K, K) sum_b HSIC(L, L))` with the unbiased HSIC of each minibatch, so
    that batches may be small (Nguyen et al. 2021; UN Fig. 6). `layers` are name patterns.

    Raises:
        ValueError: If no layer fits a pattern, or there are no batches.

    >>> model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(8, 3)
    >>> cka(model, model, [x], ["1"]).values.round(decimals=4).tolist()
    [[1.0]]
    """
    patterns = list(layers)
    names, others = (
        [name for name, _ in each.named_modules() if any(fnmatchcase(name, pattern) for pattern in patterns)]
        for each in (model, other)
    )
    if not names or not others:
        raise ValueError(f"no layer is called {', '.join(patterns)}")
    joint = own = other_own = torch.zeros(())
    for batch in batches:
        k, l = _kernels(model, names, batch), _kernels(other, others, batch)  # noqa: E741
        joint = joint + hsic(k[:, None], l[None])
        own, other_own = own + hsic(k, k), other_own + hsic(l, l)
    if joint.dim() == 0:
        raise ValueError("there are no batches to compare layers on")
    return LayerSimilarity(tuple(names), tuple(others), joint / (own[:, None] * other_own[None]).sqrt())


def _kernels(model: nn.Module, names: list[str], batch: Any) -> Tensor:
    """Gram matrices `[layers, n, n]` of the outputs of layers for a batch."""
    seen: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        y = y.flatten(1).double()  # large common parts cancel in the criterion
        y = y - y.mean(0)
        seen[name] = y @ y.T

    with evaluating(model), ExitStack() as hooks:
        for name in names:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(partial(keep, name)))
        call(model, batch)
    if missing := [name for name in names if name not in seen]:
        raise ValueError(f"{missing[0]} is not run by the model's forward")
    return torch.stack([seen[name] for name in names])
