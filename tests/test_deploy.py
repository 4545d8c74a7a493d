"""benchmarks/deploy.py from end to end on a tiny model."""

import csv
import pathlib
import sys

import pytest


@pytest.mark.slow
def test_every_norm_is_compared_with_layernorm_in_the_same_scheme(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("onnxruntime")
    monkeypatch.syspath_prepend(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
    import deploy

    out = tmp_path / "deploy.csv"
    words = ["--models", "tiny", "--norms", "layer", "folded", "--rounds", "2", "--out", str(out)]
    deploy.main([*words, "--schemes", "float32", "dynamic", "products"])
    deploy.main([*words, "--schemes", "float32"])  # replaces its rows, keeps the others
    with out.open(encoding="utf8") as file:
        rows = {(row["scheme"], row["norm"]): row for row in csv.DictReader(file)}
    assert len(rows) == 6
    assert all(row["ratio"] == "1.0" for (_, norm), row in rows.items() if norm == "layer")
    assert all(float(row["likeness"]) > 0.9 for row in rows.values())
    assert all("60 rounds" in row["verdict"] for row in rows.values())
    assert "LayerNorm" in rows["float32", "layer"]["fused"]
    assert "LayerNorm" not in rows["float32", "folded"]["fused"]
    assert "deploy" in sys.modules
