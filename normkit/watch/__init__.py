"""Record statistics of norms while a model trains, and find faults in them."""

from normkit.watch.checks import NOT_CHECKED, THRESHOLDS, Finding
from normkit.watch.diagnose import checked, diagnose
from normkit.watch.quantities import QUANTITIES, Quantity
from normkit.watch.record import Recorder, record
from normkit.watch.rows import Appender, Recording, Row, Rows, Series, read, read_run, write

__all__ = [
    "NOT_CHECKED", "QUANTITIES", "THRESHOLDS", "Appender", "Finding", "Quantity", "Recorder", "Recording", "Row",
    "Rows", "Series", "checked", "diagnose", "read", "read_run", "record", "write",
]  # fmt: skip
