"""Transforms of models that somebody else wrote; none changes the model that it is given, unless asked."""

from normkit.transforms.audit import Audit, audit
from normkit.transforms.blend import Blend, blend, settle
from normkit.transforms.calibrate import calibrate
from normkit.transforms.center import to_rms
from normkit.transforms.convert import convert, find, unreadable
from normkit.transforms.export import Exported, export
from normkit.transforms.fold import Report, fold
from normkit.transforms.plan import Fate

__all__ = [
    "Audit",
    "Blend",
    "Exported",
    "Fate",
    "Report",
    "audit",
    "blend",
    "calibrate",
    "convert",
    "export",
    "find",
    "fold",
    "settle",
    "to_rms",
    "unreadable",
]
