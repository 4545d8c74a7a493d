"""normkit: swap, train, watch and fold away the norms of any Transformer."""

from normkit.norms import (
    MABN,
    NORMS,
    PNV,
    UN,
    BatchNorm,
    BatchRenorm,
    DyT,
    FixNorm,
    GroupNorm,
    LayerNorm,
    NoNorm,
    Norm,
    PowerNorm,
    RMSNorm,
    ScaleNorm,
    Split,
    fix_embedding,
    make,
    options,
)
from normkit.transforms import audit, calibrate, convert, find, fold

__version__ = "0.1.0"

__all__ = [
    "MABN",
    "NORMS",
    "PNV",
    "UN",
    "BatchNorm",
    "BatchRenorm",
    "DyT",
    "FixNorm",
    "GroupNorm",
    "LayerNorm",
    "NoNorm",
    "Norm",
    "PowerNorm",
    "RMSNorm",
    "ScaleNorm",
    "Split",
    "audit",
    "calibrate",
    "convert",
    "find",
    "fix_embedding",
    "fold",
    "make",
    "options",
]
