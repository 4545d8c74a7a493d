"""Counts of operations, moves and launches of norms match benchmarks/results/counts.csv."""

import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from normkit.kernels import build

ROOT = Path(__file__).parents[1]
FOUR = 4  # launches that a norm may have, forward and backward together


@pytest.fixture(scope="module")
def rows():
    return list(csv.DictReader((ROOT / "benchmarks" / "results" / "counts.csv").read_text().splitlines()))


def total(rows, column, mask=""):
    found = {}
    for row in rows:
        if row["mask"] == mask:
            found[row["norm"]] = found.get(row["norm"], 0) + float(row[column])
    return found


@pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="counted with torch 2.13")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton's interpreter counts launches")
@pytest.mark.skipif(bool(build.obstacle()), reason=f"the kernels for CPUs are counted: {build.obstacle()}")
def test_the_file_holds_what_is_counted():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "COV_"))}
    ended = subprocess.run(
        [sys.executable, "benchmarks/counts.py", "--check"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert ended.returncode == 0, f"run python benchmarks/counts.py and check the diff\n{ended.stdout}{ended.stderr}"


def test_moves_is_five_activations_or_eight_with_batch_statistics(rows):
    for mask in ("", "masked"):
        moved = {**total(rows, "moves"), **total(rows, "moves", mask)}
        for name in ("rms", "scale", "power(groups=0)", "power"):
            assert moved[name] <= moved["nn.LayerNorm"] + 0.2, name
        for name in ("batch", "pnv", "mabn", "un", "renorm"):
            assert moved[name] <= 8.5, name  # 3 + 5, and small vectors


def test_fused_norms_move_less_than_twice_the_bytes_of_layer_norm(rows):
    moved = total(rows, "fused_moves")
    for name in ("rms", "scale", "batch", "pnv", "mabn", "un", "renorm", "power(groups=0)"):
        assert moved[name] <= 1.9 * moved["nn.LayerNorm"], name


def test_norms_of_rows_take_four_launches_at_most(rows):
    launches = total(rows, "launches")
    assert all(launches[name] <= FOUR for name in ("layer", "rms", "scale", "group"))


def test_norms_by_batch_statistics_apply_their_rules_within_the_launches_of_their_sums(rows):
    launches = total(rows, "launches")
    assert all(launches[name] <= FOUR + 2 for name in ("batch", "pnv", "renorm", "mabn", "un", "power"))
    assert launches["power(groups=0)"] <= FOUR


def test_a_mask_costs_a_gpu_no_launch(rows):
    masked = total(rows, "launches", "masked")
    assert len(masked) > FOUR
    assert masked == {name: n for name, n in total(rows, "launches").items() if name in masked}
