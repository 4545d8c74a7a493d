"""benchmarks/edge.py on tiny models, and the tables that it makes.

Compilers for small devices are no dependency of ours: their tests are skipped where they are not installed.
"""

import importlib
import pathlib
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def edge(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("edge")


@pytest.fixture
def edge_page(monkeypatch):
    """The script that writes the tables, as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("edge_page")


def test_folded_variant_computes_what_un_computes(edge):
    _, un, folded = edge.random_cases("one-block")
    torch.testing.assert_close(folded.model(un.calibration), un.model(un.calibration), rtol=1e-4, atol=1e-4)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(un.model(un.calibration[:1]), un.model(un.calibration[1:2]), rtol=1e-4, atol=1e-4)


def test_result_file_keeps_models_not_measured_again(edge, tmp_path):
    path = tmp_path / "edge.json"
    edge.keep(path, "first", [{"model": "a", "cpu": 1}, {"model": "b", "cpu": 2}], {})
    edge.keep(path, "second", [{"model": "a", "cpu": 3}], {})
    result = edge.json.loads(path.read_text())
    assert result["rows"] == [{"model": "b", "cpu": 2}, {"model": "a", "cpu": 3}]
    assert result["commands"] == {"a": "second", "b": "first"}


def test_page_shows_kept_results(edge_page):
    page = edge_page.PAGE.read_text(encoding="utf8")
    assert page.count("<!-- measured: edge-") == len(edge_page.TABLES)
    assert edge_page.fill(page) == page, "run python benchmarks/edge_page.py"


def test_npu_takes_every_operation(edge, tmp_path):
    pytest.importorskip("litert_torch", reason="benchmarks/edge-requirements.txt is not installed")
    if not (pathlib.Path(sys.executable).parent / "vela").exists():
        pytest.skip("ethos-u-vela is not installed")
    *_, folded = edge.random_cases("one-block")
    with edge.quiet():
        edge.write_int8(folded.model, folded.calibration, tmp_path / "folded.tflite")
    run = edge.LiteRT(tmp_path / "folded.tflite")
    assert set(run.types) == {"int8", "int32"}
    assert edge.vela(tmp_path / "folded.tflite", "ethos-u55-128")["cpu"] == 0
