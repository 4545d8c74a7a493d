"""How many ATen operations a norm takes is written down; whoever changes it sees it in the diff."""

import csv
import io
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


def counts():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import counts
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return counts


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="counted with torch 2.13")
def test_operations_and_bytes_are_those_of_the_file():
    assert counts().text() == counts().RESULT.read_text(), "run python benchmarks/counts.py and look at the diff"


def test_norms_by_batch_statistics_move_less_than_twice_what_layer_norm_moves():
    moved = {}
    for row in csv.DictReader(io.StringIO(counts().text())):
        moved[row["norm"]] = moved.get(row["norm"], 0) + float(row["moves"])
    for name in ("rms", "scale", "batch", "pnv", "mabn", "un", "renorm", "power(groups=0)"):
        assert moved[name] <= 1.9 * moved["nn.LayerNorm"], name
