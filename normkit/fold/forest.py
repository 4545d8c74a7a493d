"""A union-find, vectorized, of numbers that are multiples or inverses of one another."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Forest(NamedTuple):
    """For each node: `s[node] = ratio * s[root] ** exponent`.

    `value` is s of the roots, 1 where it is `free`. `broken` marks given edges that contradict the rest.
    """

    root: Tensor
    exponent: Tensor
    ratio: Tensor
    value: Tensor
    free: Tensor
    broken: Tensor

    def values(self) -> Tensor:
        """The value of every node."""
        return self.ratio * self.value[self.root] ** self.exponent


def unite(size: int, a: Tensor, b: Tensor, exponent: Tensor, ratio: Tensor) -> Forest:
    """Unite nodes by edges `s[a] = ratio * s[b] ** exponent`.

    Exponents are 1 and -1, and node 0 has the value 1. The root of a class is its node with the lowest number. A class
    that meets itself with the opposite exponent has `s ** 2` given, which has to be positive.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> unite(3, torch.tensor([2]), torch.tensor([1]), one, 3 * one).values().tolist()
    [1.0, 1.0, 3.0]
    """
    root = torch.arange(size)
    power, factor = torch.ones(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    edges = torch.arange(len(a))
    while True:
        p, q = root[a], root[b]
        if not bool((p != q).any()):
            break
        high, low = torch.maximum(p, q), torch.minimum(p, q)
        key = torch.where(p != q, low * len(a) + edges, size * len(a))
        best = torch.full((size,), size * len(a)).scatter_reduce_(0, high, key, "amin")
        hooked = (best < size * len(a)).nonzero().flatten()
        e = best[hooked] % len(a)
        # s[p] = c * s[q] ** k from the edge's own equation, then solved for the higher of the two
        i, j = a[e], b[e]
        c = (ratio[e] * factor[j] ** exponent[e] / factor[i]) ** power[i]
        k = power[i] * power[j] * exponent[e]
        c = torch.where(root[i] == hooked, c, c**-k)
        parent, up, by = torch.arange(size), torch.ones_like(power), torch.ones_like(factor)
        parent[hooked], up[hooked], by[hooked] = low[e], k, c
        while bool((parent[parent] != parent).any()):
            by, up, parent = by * by[parent] ** up, up * up[parent], parent[parent]
        factor, power, root = factor * by[root] ** power, power * up[root], parent[root]
    value, free = torch.ones(size, dtype=torch.float64), root == torch.arange(size)
    same = power[a] == power[b] * exponent
    square = (ratio * factor[b] ** exponent / factor[a]) ** power[a]  # s[root] ** 2, where the exponents differ
    positive = ~same & (square > 0) & (root[a] != 0)
    value[root[a][positive]] = square[positive].sqrt()
    free[root[a][~same]] = False
    free[:1] = False
    found = factor * value[root] ** power
    error = (found[a] / (ratio * found[b] ** exponent) - 1).abs()
    return Forest(root, power, factor, value, free, ~(error < 1e-11))


def components(size: int, pairs: Iterable[tuple[int, int]]) -> Tensor:
    """The lowest member of the connected component of each node.

    >>> components(4, [(3, 1)]).tolist()
    [0, 1, 2, 1]
    """
    a, b = torch.tensor([*pairs], dtype=torch.long).view(-1, 2).T
    one = torch.ones(len(a), dtype=torch.float64)
    return unite(size, a, b, one, one).root
