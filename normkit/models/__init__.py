"""Changes to any PyTorch model: swap, calibrate and export its norms.

They return a changed copy; those with `inplace=True` change the given model.
"""

from normkit.models.calibrate import calibrate
from normkit.models.convert import convert, find, unreadable
from normkit.models.export import Exported, export
from normkit.models.follow_optimizer import OptimizerLink, follow_optimizer
from normkit.models.huggingface import load_pretrained, save_pretrained
from normkit.models.scale_loss import scale_loss

__all__ = [
    "Exported", "OptimizerLink", "calibrate", "convert", "export", "find", "follow_optimizer",
    "load_pretrained", "save_pretrained", "scale_loss", "unreadable",
]  # fmt: skip
