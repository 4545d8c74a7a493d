"""See what norms do while a model trains, and be told what is wrong."""

from normkit.watch.cka import Alikeness, cka
from normkit.watch.diagnose import THRESHOLDS, Finding, advise, diagnose
from normkit.watch.quantities import QUANTITIES, Quantity
from normkit.watch.record import Recorder, record
from normkit.watch.rows import Row, Rows, read, write
from normkit.watch.whole import embedding_rows, singular_values, train_eval_gap

__all__ = [
    "QUANTITIES",
    "THRESHOLDS",
    "Alikeness",
    "Finding",
    "Quantity",
    "Recorder",
    "Row",
    "Rows",
    "advise",
    "cka",
    "diagnose",
    "embedding_rows",
    "read",
    "record",
    "singular_values",
    "train_eval_gap",
    "write",
]
