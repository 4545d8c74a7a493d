"""Kernels under Triton's interpreter and compiled ahead of time, in child processes.

The variable that turns the interpreter on is read when kernels are defined.
"""

import json
import os
import pathlib
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import torch
from packaging.version import Version

import normkit
from normkit.kernels import dispatch

HERE = pathlib.Path(__file__).parent
PATHS = os.pathsep.join([str(HERE.parent), str(HERE.parent / "papers")])  # the benchmark trains models of the papers
TESTS = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/test_kernels.py", "tests/triton_interpreted.py"]
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def interpreter_fails():
    """True for Triton 3.6 with NumPy 2.4, which reject each other's arrays."""
    if not find_spec("triton"):
        return False
    return Version(version("triton")) < Version("3.7") and Version(version("numpy")) >= Version("2.4")


needs_interpreter = pytest.mark.skipif(interpreter_fails(), reason="triton 3.6 interprets with numpy below 2.4")


def child(arguments, **variables):
    """Output of a Python in whose environment only these variables of Triton are set."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("TRITON_", "COV_", "PYTEST_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, **variables}
    ended = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        cwd=HERE.parent,
        env=environment,
        timeout=500,
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
    return ended.stdout


@needs_triton
@needs_interpreter
def test_kernels_match_the_reference_under_the_interpreter():
    out = child(TESTS, TRITON_INTERPRET="1", NORMKIT_TEST_TRITON="1")
    assert " passed" in out
    assert "skipped" not in out


@needs_triton
def test_kernels_compile_for_gpus_that_are_not_here(tmp_path):
    out = child([str(HERE / "triton_compile.py"), "80", "90", "100"], TRITON_CACHE_DIR=str(tmp_path))
    made = json.loads(out)
    alone = {row["kernel"] for row in made if row["dtype"] != "of a plan"}
    assert alone == {
        "row_forward", "row_backward", "add_partials", "column_forward", "merge_moments", "column_backward"
    }  # fmt: skip
    planned = {(row["kernel"], row["sm"]) for row in made if row["dtype"] == "of a plan"}
    names = "column_forward", "window_excess", "train_rule", "column_backward", "grad_rule"
    assert planned == {(name, sm) for name in names for sm in (80, 90, 100)}
    for row in made:
        assert row["atomics"] == 0, row
        assert row["local"] == 0, row
        assert row["stack"] <= 256, row  # bytes of a thread: 32 with triton 3.7, 208 with 3.6, 1744 without the loop
        assert 0 < row["reg"] <= 255, row


@needs_triton
@needs_interpreter
def test_the_script_for_gpus_runs_dry(tmp_path):
    child(["benchmarks/gpu.py", str(tmp_path), "--dry"])
    assert json.loads((tmp_path / "failures.json").read_text()) == {}
    for name in ("speed", "launches", "steps"):
        assert len((tmp_path / f"{name}.csv").read_text().splitlines()) > 5


@needs_triton
@pytest.mark.gpu
def test_kernels_match_the_reference_on_the_device():
    out = child(TESTS, NORMKIT_TEST_TRITON="1")
    assert " passed" in out


@pytest.mark.skipif(dispatch.is_interpreted(), reason="the interpreter is on")
@needs_triton
def test_triton_kernels_on_a_cpu_tensor_raise():
    with pytest.raises(RuntimeError, match="triton"), normkit.kernels("triton"):
        dispatch.select(torch.ones(2, 4), "layer")
