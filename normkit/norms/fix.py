"""FixNorm (Nguyen & Salazar 2019, arXiv:1910.05895, section 2.3 and Eq. 6)."""

import gc

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normkit._util import is_number, require


class FixNorm(nn.Module):
    """Parametrization of an embedding by rows of length one, `E = W / ||w||`.

    The gradient passes through the division. A row no longer than `eps`, as that of padding, stays zero and gets no
    gradient. The paper's `W / max(||w||, eps)` would give it that of a tied output, times 1 / eps. Inputs are
    `sqrt(dim) * E[token]`, tied outputs `h @ E.T (+ bias)`; after a last `ScaleNorm` these are `g cos(w, x)`.

    Args:
        eps: Length up to which a row is zero.
    """

    def __init__(self, eps: float = 1e-12):
        super().__init__()
        require(is_number(eps) and eps >= 0, "eps", eps, "a number of at least 0")
        self.eps = eps

    def forward(self, weight: Tensor) -> Tensor:
        """Return the rows of `weight [words, dim]` at length one."""
        length = weight.norm(dim=-1, keepdim=True)
        return weight / length.masked_fill(length <= self.eps, torch.inf)


def fix_embedding(embedding: nn.Embedding, *tied: nn.Module, init: float | None = 0.01) -> nn.Embedding:
    """Give an embedding FixNorm, in place: `embedding.weight` then has rows of length one.

    Args:
        embedding: A plain `nn.Embedding`.
        *tied: All other modules with the same weight, such as a tied output layer. They get FixNorm, too.
        init: Draw the matrix from U(-init, init), 0.01 as in the authors' code; None keeps it. Padding stays zero.

    Returns:
        The same embedding.

    Raises:
        TypeError: if it is no `nn.Embedding`.
        ValueError: if its weight is parametrized already, its gradients are sparse, it has a `max_norm`, a module of
            `tied` has another weight, or one that is not named has this weight: it would keep the raw rows.

    >>> fix_embedding(nn.Embedding(5, 4)).weight.norm(dim=1).round(decimals=4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    if not isinstance(embedding, nn.Embedding):
        raise TypeError(f"fix_embedding() takes an nn.Embedding; got {type(embedding).__name__}")
    if parametrize.is_parametrized(embedding, "weight"):
        raise ValueError("this embedding's weight is parametrized already; FixNorm goes on a plain nn.Embedding")
    if embedding.sparse or embedding.max_norm is not None:
        raise ValueError("FixNorm has dense gradients and rows of length one: no sparse=True, no max_norm")
    require(init is None or (is_number(init) and init > 0), "init", init, "a number above 0 or None")
    holders = [module for module in _modules() if any(p is embedding.weight for p in module._parameters.values())]
    if left := [module for module in holders if module not in (embedding, *tied)]:
        raise ValueError(f"{type(left[0]).__name__} has the embedding's weight, too; call fix_embedding(embedding, it)")
    if other := [module for module in tied if module not in holders]:
        raise ValueError(f"{type(other[0]).__name__} has another weight than the embedding; give tied modules alone")
    if init is not None:
        nn.init.uniform_(embedding.weight, -init, init)
        if embedding.padding_idx is not None:
            embedding.weight.data[embedding.padding_idx].zero_()
    for module in dict.fromkeys((embedding, *tied)):
        parametrize.register_parametrization(module, "weight", FixNorm())
    return embedding


def _modules() -> list[nn.Module]:
    """Return all modules of the program, for an embedding does not know the model around it."""
    return [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module) and "_parameters" in vars(thing)]
