"""Donor batches: training items, chosen by length, that lend their statistics."""

import numpy as np

from normkit_papers.train.donor_kinds import DonorKind


class Donors:
    """Finds donors in a table of training pairs, always the same ones.

    >>> from normkit_papers.train.donor_kinds import DONORS
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
