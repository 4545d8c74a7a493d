"""Donor batches: training items, chosen by length, that lend their statistics.

A test batch's own statistics depend on its right answers, which are input of the decoder. Donors show what the
statistics of *such* a batch are worth, and which of its lengths matter.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class DonorKind(NamedTuple):
    """Which training item stands in for a test item, and where its statistics are used.

    Attributes:
        about: Description.
        key: Maps lengths `[items, 2]` of source and target to what donor and test item have in common.
        longer: Number of symbols by which the donor's target is longer.
        sites: Name pattern of the norms that use donor statistics; the others use running ones.
    """

    about: str
    key: Callable[[np.ndarray], np.ndarray]
    longer: int = 0
    sites: str = "*"


def _both(sizes: np.ndarray) -> np.ndarray:
    return sizes


def _source(sizes: np.ndarray) -> np.ndarray:
    return sizes[:, :1]


def _nothing(sizes: np.ndarray) -> np.ndarray:
    return sizes[:, :0]


DONORS: dict[str, DonorKind] = {
    "donors": DonorKind("of other training items of the same lengths", _both),
    "donors source": DonorKind("of other training items of the same source length", _source),
    "donors longer": DonorKind("of other training items, target two symbols longer", _both, 2),
    "donors shorter": DonorKind("of other training items, target two symbols shorter", _both, -2),
    "donors any": DonorKind("of other training items of any lengths", _nothing),
    "donors encoder": DonorKind("of such items in the encoder, running ones in the decoder", _both, 0, "encoder.*"),
    "donors decoder": DonorKind("of such items in the decoder, running ones in the encoder", _both, 0, "decoder.*"),
    "donors first": DonorKind(
        "of such items in the first layers, running ones in the others", _both, 0, "*.layers.0.*"
    ),
}
"""Kinds of scores by donor statistics. Norms outside of `sites` keep the running statistics."""


class Donors:
    """Finds donors in a table of training pairs, always the same ones.

    >>> donors = Donors(np.array([[5, 3], [5, 4], [9, 9]]))
    >>> donors.choose(np.array([[5, 4], [8, 8]]), DONORS["donors"]).tolist()
    [1, 2]
    """

    def __init__(self, sizes: np.ndarray):
        self.sizes, self.random = sizes, np.random.default_rng(0)
        self._groups: dict[str, tuple[np.ndarray, list[np.ndarray]]] = {}

    def choose(self, sizes: np.ndarray, kind: DonorKind) -> np.ndarray:
        """Return a training item for each row of `sizes`, of the nearest lengths."""
        keys, items = self._grouped(kind)
        wanted, place = np.unique(kind.key(sizes + np.array([0, kind.longer])), axis=0, return_inverse=True)
        found = np.empty(len(sizes), dtype=np.int64)
        for number, key in enumerate(wanted):
            nearest = items[int(np.abs(keys - key).sum(1).argmin())]
            (rows,) = np.nonzero(place.reshape(-1) == number)
            found[rows] = self.random.choice(nearest, len(rows), replace=len(rows) > len(nearest))
        return found

    def _grouped(self, kind: DonorKind) -> tuple[np.ndarray, list[np.ndarray]]:
        """Training items by key, grouped once."""
        name = kind.key.__name__
        if name not in self._groups:
            keys, place, counts = np.unique(kind.key(self.sizes), axis=0, return_inverse=True, return_counts=True)
            order = np.argsort(place.reshape(-1), kind="stable")
            self._groups[name] = keys, np.split(order, np.cumsum(counts)[:-1])
        return self._groups[name]
