"""See what norms do while a model trains, and be told what is wrong."""

from normkit.watch.advise import advise
from normkit.watch.cka import Alikeness, cka
from normkit.watch.diagnose import NOT_CHECKED, checked, diagnose
from normkit.watch.faults import THRESHOLDS, Finding
from normkit.watch.model_statistics import embedding_rows, singular_values, train_eval_gap
from normkit.watch.quantities import QUANTITIES, Quantity
from normkit.watch.record import Recorder, record
from normkit.watch.rows import Row, Rows, read, write

__all__ = [
    "NOT_CHECKED",
    "QUANTITIES",
    "THRESHOLDS",
    "Alikeness",
    "Finding",
    "Quantity",
    "Recorder",
    "Row",
    "Rows",
    "advise",
    "checked",
    "cka",
    "diagnose",
    "embedding_rows",
    "read",
    "record",
    "singular_values",
    "train_eval_gap",
    "write",
]
