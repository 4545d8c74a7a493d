"""Kinds of donor batches: which training items lend their statistics to a test item.

A test batch's own statistics depend on its right answers, which are input of the decoder. Donors show what the
statistics of *such* a batch are worth, and which of its lengths matter.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
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
    key: Callable[["np.ndarray"], "np.ndarray"]
    longer: int = 0
    sites: str = "*"


def _both(sizes: "np.ndarray") -> "np.ndarray":
    return sizes


def _source(sizes: "np.ndarray") -> "np.ndarray":
    return sizes[:, :1]


def _nothing(sizes: "np.ndarray") -> "np.ndarray":
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
