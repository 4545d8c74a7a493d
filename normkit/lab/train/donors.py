"""Donor batches: training items, chosen by length, whose statistics serve test items.

A test batch's own statistics depend on its right answers, which are input of the decoder. Donors show what the
statistics of *such* a batch are worth, and which of its lengths matter.
"""

from typing import NamedTuple

import numpy as np


class DonorKind(NamedTuple):
    """Which training item stands in for a test item, and where its statistics are used.

    Attributes:
        about: Description.
        same: Lengths that donor and test item have in common: 2, of source and target; 1, of the source; 0, none.
        longer: Number of symbols by which the donor's target is longer.
        sites: Name pattern of the norms that use donor statistics; the others use running ones.
    """

    about: str
    same: int = 2
    longer: int = 0
    sites: str = "*"


DONORS: dict[str, DonorKind] = {
    "donors": DonorKind("of other training items of the same lengths"),
    "donors source": DonorKind("of other training items of the same source length", same=1),
    "donors longer": DonorKind("of other training items, target two symbols longer", longer=2),
    "donors shorter": DonorKind("of other training items, target two symbols shorter", longer=-2),
    "donors any": DonorKind("of other training items of any lengths", same=0),
    "donors encoder": DonorKind("of such items in the encoder, running ones in the decoder", sites="encoder.*"),
    "donors decoder": DonorKind("of such items in the decoder, running ones in the encoder", sites="decoder.*"),
    "donors first": DonorKind("of such items in the first layers, running ones in the others", sites="*.layers.0.*"),
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
        self._groups: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}

    def choose(self, sizes: np.ndarray, kind: DonorKind) -> np.ndarray:
        """Return a training item for each row of `sizes`, of the nearest lengths."""
        keys, items = self._grouped(kind.same)
        lengths = (sizes + np.array([0, kind.longer]))[:, : kind.same]
        wanted, place = np.unique(lengths, axis=0, return_inverse=True)
        found = np.empty(len(sizes), dtype=np.int64)
        for number, key in enumerate(wanted):
            nearest = items[int(np.abs(keys - key).sum(1).argmin())]
            (rows,) = np.nonzero(place.reshape(-1) == number)
            found[rows] = self.random.choice(nearest, len(rows), replace=len(rows) > len(nearest))
        return found

    def _grouped(self, same: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Training items by their first `same` lengths, grouped once."""
        if same not in self._groups:
            keys, place, counts = np.unique(self.sizes[:, :same], axis=0, return_inverse=True, return_counts=True)
            order = np.argsort(place.reshape(-1), kind="stable")
            self._groups[same] = keys, np.split(order, np.cumsum(counts)[:-1])
        return self._groups[same]
