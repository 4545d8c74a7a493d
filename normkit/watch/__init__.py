"""Record statistics of norms while a model trains, and find faults in them."""

from normkit.watch.diagnose import NOT_CHECKED, THRESHOLDS, Finding, checked, diagnose
from normkit.watch.quantities import QUANTITIES, Quantity
from normkit.watch.record import Recorder, record
from normkit.watch.recording import Recording, Row, Series
from normkit.watch.row_files import Appender, Rows, read, read_run, write

__all__ = [
    "NOT_CHECKED", "QUANTITIES", "THRESHOLDS", "Appender", "Finding", "Quantity", "Recorder", "Recording", "Row",
    "Rows", "Series", "checked", "diagnose", "read", "read_run", "record", "write",
]  # fmt: skip
