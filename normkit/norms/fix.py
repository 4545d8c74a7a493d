"""FixNorm (Nguyen & Salazar 2019, arXiv:1910.05895, section 2.3 and Eq. 6): word vectors of length one."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class FixNorm(nn.Module):
    """A parametrization of an embedding: each row of the matrix divided by its length, `E = W / ||w||`.

    The gradient goes through the division. A row no longer than `eps`, as that of padding, stays zero and gets no
    gradient: the paper's `W / max(||w||, eps)` would give it that of a tied output, times 1 / eps. Inputs are
    `sqrt(dim) * E[token]`, tied outputs `h @ E.T (+ bias)`; after a last `ScaleNorm` these are `g cos(w, x)`. Eq. 6 has
    no bias at the output, the authors' code has one.
    """

    def __init__(self, eps: float = 1e-12):
        super().__init__()
        self.eps = eps

    def forward(self, weight: Tensor) -> Tensor:
        """The rows of `weight [words, dim]` at length one."""
        length = weight.norm(dim=-1, keepdim=True)
        return weight / length.masked_fill(length <= self.eps, torch.inf)


def fix_embedding(embedding: nn.Embedding, *, init: float | None = 0.01) -> nn.Embedding:
    """Give an embedding FixNorm, in place: from now on `embedding.weight` has rows of length one.

    `init` draws the matrix from U(-init, init) first, as the authors' code (None keeps it); rows of padding stay zero.

    >>> fix_embedding(nn.Embedding(5, 4)).weight.norm(dim=1).round(decimals=4).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0]
    """
    if not isinstance(embedding, nn.Embedding):
        raise TypeError(f"fix_embedding() takes an nn.Embedding; got {type(embedding).__name__}")
    if parametrize.is_parametrized(embedding, "weight"):
        raise ValueError("this embedding's weight is parametrized already; FixNorm goes on a plain nn.Embedding")
    if init is not None:
        nn.init.uniform_(embedding.weight, -init, init)
        if embedding.padding_idx is not None:
            embedding.weight.data[embedding.padding_idx].zero_()
    parametrize.register_parametrization(embedding, "weight", FixNorm())
    return embedding
