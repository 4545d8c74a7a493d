"""Rows of results in CSV files, and where they were measured."""

import csv
import io
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from normkit._util import write_whole

QUIET = {  # variables of a process that is timed: no spinning threads, no fresh pages for every tensor
    "OMP_WAIT_POLICY": "PASSIVE", "MALLOC_MMAP_THRESHOLD_": "2147483647", "MALLOC_TRIM_THRESHOLD_": "17179869184",
}  # fmt: skip


def keep(path: Path, columns: Iterable[str], key: Iterable[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Put rows into a CSV file, in place of those with the same `key`; sort by these columns."""
    key = tuple(key)
    old = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf8")))) if path.exists() else []
    made = {tuple(str(row[each]) for each in key): row for row in [*old, *rows]}
    text = io.StringIO()
    writer = csv.DictWriter(text, [*columns], lineterminator="\n")
    writer.writeheader()
    writer.writerows(made[each] for each in sorted(made))
    write_whole(path, text.getvalue().encode())


def quiet() -> None:
    """Start this program again with the variables of `QUIET` if it does not have them."""
    if any(os.environ.get(key) != value for key, value in QUIET.items()):
        os.execve(sys.executable, [sys.executable, "-W", "ignore", *sys.argv], {**os.environ, **QUIET})


def commit() -> str:
    """The commit of this repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def processor() -> str:
    """The name of the processor."""
    about = Path("/proc/cpuinfo")
    lines = about.read_text(encoding="utf8").splitlines() if about.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
