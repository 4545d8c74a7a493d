"""Record statistics of norms while a model trains, and find faults in them."""

from normkit.watch.diagnose import Findings, diagnose
from normkit.watch.findings import NOT_CHECKED, THRESHOLDS, Finding
from normkit.watch.quantities import QUANTITIES, Quantity
from normkit.watch.record import record
from normkit.watch.recorder import Recorder
from normkit.watch.rows import Appender, Recording, Row, Rows, Series, read, read_run, write

__all__ = [
    "NOT_CHECKED", "QUANTITIES", "THRESHOLDS", "Appender", "Finding", "Findings", "Quantity", "Recorder", "Recording",
    "Row", "Rows", "Series", "diagnose", "read", "read_run", "record", "write",
]  # fmt: skip
