"""Flags and result files of the scripts that measure norms over shapes and types on a CPU."""

import argparse
import csv
import io
from collections.abc import Sequence
from pathlib import Path

import torch

from normkit.files import write_whole

SHAPES = ("4096x512", "8192x768", "32768x384")
DTYPES = ("float32", "bfloat16")


def parser(about: str, file: str, shapes: Sequence[str] = SHAPES, dtypes: Sequence[str] = DTYPES, rounds: int = 60):
    """Parser of the common flags; `file` is the result file in benchmarks/results."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--shapes", nargs="+", default=shapes)
    made.add_argument("--dtypes", nargs="+", default=dtypes)
    made.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / file)
    return made


def begin(threads: int) -> None:
    """Set the number of threads, and let Dynamo compile one function for many norms."""
    torch.set_num_threads(threads)
    torch._dynamo.config.recompile_limit = 64


def keep(path: Path, fields: Sequence[str], rows: Sequence[dict]) -> None:
    """Write the rows as CSV, all or none."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode())
