"""See what norms do while a model trains."""

from normkit.watch.record import Row, Rows, record

__all__ = ["Row", "Rows", "record"]
