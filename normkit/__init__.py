"""normkit: swap, train, watch and fold away the norms of any Transformer."""

from normkit.fold import audit, fold, to_rms
from normkit.kernels.dispatch import kernels
from normkit.kernels.records import keep_statistics
from normkit.models import (
    calibrate,
    convert,
    export,
    find,
    follow_optimizer,
    load_pretrained,
    save_pretrained,
    scale_loss,
)
from normkit.norms import (
    NORMS,
    PNV,
    UN,
    BatchNorm,
    GroupNorm,
    LayerNorm,
    Norm,
    PowerNorm,
    RMSNorm,
    ScaleNorm,
    fix_embedding,
    make,
    options,
)
from normkit.removal import remove_norms
from normkit.watch import diagnose, record

__version__ = "0.2.0"

__all__ = [
    "NORMS", "PNV", "UN", "BatchNorm", "GroupNorm", "LayerNorm", "Norm", "PowerNorm", "RMSNorm", "ScaleNorm",
    "audit", "calibrate", "convert", "diagnose", "export", "find", "fix_embedding", "fold", "follow_optimizer",
    "keep_statistics", "kernels", "load_pretrained", "make", "options", "record", "remove_norms",
    "save_pretrained", "scale_loss", "to_rms",
]  # fmt: skip
