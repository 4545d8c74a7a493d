"""See what norms do while a model trains."""

from normkit.watch.quantities import QUANTITIES, Quantity
from normkit.watch.record import Recorder, record
from normkit.watch.rows import Row, Rows, read, write

__all__ = ["QUANTITIES", "Quantity", "Recorder", "Row", "Rows", "read", "record", "write"]
