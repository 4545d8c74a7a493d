"""Transforms of any PyTorch model: swap, calibrate, fold and export its norms.

They return a changed copy; those with `inplace=True` change the given model.
"""

from normkit.transforms.audit import audit
from normkit.transforms.blend import Blend, blend, settle
from normkit.transforms.calibrate import calibrate
from normkit.transforms.convert import convert, find, unreadable
from normkit.transforms.export import Exported, export
from normkit.transforms.fit import fit_norms
from normkit.transforms.fold import Outcome, Report, fold
from normkit.transforms.fold.report import Audit
from normkit.transforms.follow_optimizer import OptimizerLink, follow_optimizer
from normkit.transforms.huggingface import load_pretrained, save_pretrained
from normkit.transforms.layernorm_to_rmsnorm import to_rms
from normkit.transforms.quantize import Int8
from normkit.transforms.scale_loss import scale_loss

__all__ = [
    "Audit", "Blend", "Exported", "Int8", "OptimizerLink", "Outcome", "Report", "audit", "blend", "calibrate",
    "convert", "export", "find", "fit_norms", "fold", "follow_optimizer", "load_pretrained", "save_pretrained",
    "scale_loss", "settle", "to_rms", "unreadable",
]  # fmt: skip
