"""The current step on a terminal, for work that takes more than a few seconds."""

import contextlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator

PATIENCE = 3.0  # seconds before it appears


@contextlib.contextmanager
def steps(title: str) -> Iterator[Callable[[str], None]]:
    """Show the current step on stderr, if that is a terminal and rich is installed.

    Examples:
        >>> with steps("fold") as step:
        ...     step("trace the example")
    """
    start, possible = time.monotonic(), sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    with contextlib.ExitStack() as shown:

        def step(label: str) -> None:
            if possible and time.monotonic() - start >= PATIENCE:
                from rich.console import Console

                shown.pop_all().close()
                shown.enter_context(Console(stderr=True).status(f"{title}: {label}"))

        yield step
