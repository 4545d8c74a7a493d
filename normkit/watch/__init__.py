"""Record statistics of norms while a model trains, and find faults in them."""

from normkit.watch.advise import advise
from normkit.watch.diagnose import checked, diagnose
from normkit.watch.faults import NOT_CHECKED, THRESHOLDS, Finding
from normkit.watch.model_statistics import train_eval_gap
from normkit.watch.quantities import QUANTITIES, Quantity
from normkit.watch.record import Recorder, record
from normkit.watch.recording import Recording, Row, Series
from normkit.watch.row_files import Appender, RunReader, read, read_run, write
from normkit.watch.rows import Rows

__all__ = [
    "NOT_CHECKED", "QUANTITIES", "THRESHOLDS", "Appender", "Finding", "Quantity", "Recorder", "Recording", "Row",
    "Rows", "RunReader", "Series", "advise", "checked", "diagnose", "read", "read_run", "record", "train_eval_gap",
    "write",
]  # fmt: skip
