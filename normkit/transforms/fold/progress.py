"""A progress bar on a terminal, for work that takes more than a few seconds."""

import importlib.util
import sys
import time
from types import TracebackType
from typing import Any

PATIENCE = 3.0  # seconds before a bar appears


class Steps:
    """Shows the current step on stderr, if that is a terminal and rich is installed.

    Example:
        >>> with Steps("fold") as step:
        ...     step("trace the example")
    """

    def __init__(self, title: str):
        self.title, self.start = title, time.monotonic()
        self.bar: Any = None
        self.possible = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None

    def __enter__(self) -> "Steps":
        return self

    def __call__(self, label: str) -> None:
        """Begin the next step."""
        if not self.possible or time.monotonic() - self.start < PATIENCE:
            return
        if self.bar is None:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
            self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.bar.add_task(self.title, total=None)
            self.bar.start()
        self.bar.update(self.task, description=f"{self.title}: {label}")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.stop()
