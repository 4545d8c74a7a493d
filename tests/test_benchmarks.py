"""Scripts of benchmarks write the rows that they promise, on tiny models."""

import csv
import importlib
import pathlib

import pytest
from test_remove_norms import saved

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Return a function that imports a benchmark."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def rows_of(path):
    with path.open(encoding="utf8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.filterwarnings("ignore")  # the exporter's own
def test_deploy_compares_norms_in_each_scheme(script, tmp_path):
    pytest.importorskip("onnxruntime")
    deploy, out = script("deploy"), tmp_path / "deploy.csv"
    words = ["--models", "tiny", "--schemes", "float32", "dynamic", "--norms", "layer", "folded", "--rounds", "2"]
    deploy.main([*words, "--out", str(out)])
    rows = {(row["scheme"], row["norm"]): row for row in rows_of(out)}
    assert set(rows) == {(scheme, norm) for scheme in ("float32", "dynamic") for norm in ("layer", "folded")}
    for (_, norm), row in rows.items():
        assert set(row) == set(deploy.COLUMNS)
        assert (float(row["ratio"]) == 1) or norm == "folded"
        assert 0.99 < float(row["likeness"]) <= 1
    assert "LayerNormalization" in rows["float32", "layer"]["fused"]
    assert "LayerNormalization" not in rows["float32", "folded"]["fused"]
    assert int(rows["float32", "folded"]["operations"]) > 0


def test_table_8_compares_memory_and_throughput(script, tmp_path):
    pytest.importorskip("normkit_papers")
    out = tmp_path / "table.csv"
    script("un_table8").main(["--columns", "COCO", "--rounds", "2", "--out", str(out)])
    layer, un = rows_of(out)
    assert (layer["row"], un["row"], un["column"]) == ("LN", "UN", "COCO MEM | COCO TPUT")
    assert float(layer["memory"]) > 1
    assert float(un["speed"]) > 0
    assert int(un["parameters"]) < int(layer["parameters"]), "gains and biases went into other layers"


def test_a_language_model_trains_on_text_of_its_own(script, tmp_path):
    folder, out = saved("LlamaForCausalLM", tmp_path / "model"), tmp_path / "rows.csv"
    words = [folder, tmp_path / "out", "--own", 40, "--steps", 1, "--length", 24, "--results", out]
    script("remove_norms_lm").main([str(word) for word in words])
    written = (tmp_path / "out.txt").read_text(encoding="utf8").split()
    assert len(written) > 20 * 40
    assert len(set(written)) > 3
    assert rows_of(out)[0]["norms_gone"] == "7"
    with pytest.raises(SystemExit):
        script("remove_norms_lm").main([*map(str, words), str(out)])
