"""Kinds of donor batches: which training items lend their statistics to a test item.

A test batch's own statistics depend on its right answers, which are input of the decoder. Donors show what the
statistics of *such* a batch are worth, and which of its lengths matter. The lists of studies read these kinds where
torch alone is installed; `donors.py` needs NumPy.
"""

from typing import NamedTuple


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
