"""Entry point of the command `normkit`.

It is a module of its own, so that Ctrl-C works while PyTorch is being imported.
"""

import os
import signal
import sys
from types import FrameType


def main() -> int:
    """Import normkit and run the command line.

    Ctrl-C during the import ends it in one line, with status 130.
    """
    default = signal.getsignal(signal.SIGINT)
    if default is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from normkit.cli import main as run

    signal.signal(signal.SIGINT, default)
    return run()


def _end(number: int, frame: FrameType | None) -> None:
    """End at once: the modules being imported might catch an exception."""
    sys.stderr.write("normkit: interrupted\n")
    sys.stderr.flush()
    os._exit(130)
