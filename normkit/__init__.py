"""normkit: swap, train, watch and fold away the norms of any Transformer."""

from normkit.fold import audit, fold, to_rms
from normkit.kernels.autograd import keep_statistics
from normkit.kernels.dispatch import kernels
from normkit.models import (
    Int8,
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
    InstanceNorm,
    LayerNorm,
    NoNorm,
    Norm,
    PowerNorm,
    RepBN,
    RMSNorm,
    ScaleNorm,
    Split,
    SwitchableNorm,
    fix_embedding,
    make,
    options,
)
from normkit.removal import remove_norms
from normkit.watch import diagnose, record

__version__ = "0.2.0"

__all__ = [
    "MABN", "NORMS", "PNV", "UN", "BatchNorm", "BatchRenorm", "Derf", "DyT", "FixNorm", "GroupNorm",
    "InstanceNorm", "Int8", "LayerNorm", "NoNorm", "Norm", "PowerNorm", "RMSNorm", "RepBN", "ScaleNorm", "Split",
    "SwitchableNorm", "audit", "calibrate", "convert", "diagnose", "export", "find",
    "fix_embedding", "fold", "follow_optimizer", "keep_statistics", "kernels", "load_pretrained",
    "make", "options", "record", "remove_norms", "save_pretrained", "scale_loss", "to_rms",
]  # fmt: skip
