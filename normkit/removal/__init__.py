"""Remove the norms of a trained model: convert, fit, train towards the original, fold, compare."""

from normkit.removal.budget import Cost
from normkit.removal.remove import Removal, remove_norms

__all__ = ["Cost", "Removal", "remove_norms"]
