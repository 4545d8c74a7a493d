"""normkit: swap, train, watch and fold away the norms of any Transformer."""

from normkit.kernels.channels import keep_statistics
from normkit.kernels.dispatch import kernels
from normkit.norms import (
    MABN,
    NORMS,
    PNV,
    UN,
    BatchNorm,
    BatchRenorm,
    Derf,
    DyT,
    FixNorm,
    GroupNorm,
    LayerNorm,
    NoNorm,
    Norm,
    PowerNorm,
    RepBN,
    RMSNorm,
    ScaleNorm,
    Split,
    TaperNorm,
    fix_embedding,
    make,
    options,
)
from normkit.transforms import audit, blend, calibrate, convert, export, find, settle, to_rms
from normkit.transforms.fold import fold
from normkit.watch import diagnose, record

__version__ = "0.1.0"

__all__ = [
    "MABN",
    "NORMS",
    "PNV",
    "UN",
    "BatchNorm",
    "BatchRenorm",
    "Derf",
    "DyT",
    "FixNorm",
    "GroupNorm",
    "LayerNorm",
    "NoNorm",
    "Norm",
    "PowerNorm",
    "RMSNorm",
    "RepBN",
    "ScaleNorm",
    "Split",
    "TaperNorm",
    "audit",
    "blend",
    "calibrate",
    "convert",
    "diagnose",
    "export",
    "find",
    "fix_embedding",
    "fold",
    "keep_statistics",
    "kernels",
    "make",
    "options",
    "record",
    "settle",
    "to_rms",
]
