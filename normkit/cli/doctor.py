"""The command that says what is wrong: `doctor`."""

from pathlib import Path
from typing import Any

from normkit.cli.line import parse_arguments, write

ILL = 1  # exit status where something was found


def doctor(arguments: list[str]) -> int:
    """What is wrong with a run, in words, by its recorded rows."""
    from tyro.conf import Positional

    def parse(path: Positional[Path]) -> dict[str, Any]:
        """Say what the recorded statistics of a run show: what will fail, where, and what helps; exit status 1 then.

        Args:
            path: A run folder, or a file of rows (.csv, .parquet).
        """
        return locals()

    from normkit.watch import advise, diagnose, read

    rows = read(parse_arguments(parse, arguments, "doctor")["path"])
    found, advice = diagnose(rows), advise(rows)
    write("\n".join([f"- {finding}" for finding in found] or ["nothing wrong was found"]))
    if advice:
        write("\n".join(["", "where a norm keeps no batch statistics:", *(f"- {line}" for line in advice)]))
    return ILL if found else 0
