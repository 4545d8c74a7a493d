"""Programs that tests start are forked from one process that has imported Lightning."""

from forked import forked_workers  # noqa: F401
