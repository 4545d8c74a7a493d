"""benchmarks/deploy.py from end to end on a tiny model, and the pages that it writes."""

import json
import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module", autouse=True)
def benchmarks():
    pytest.importorskip("transformers")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.remove(str(ROOT / "benchmarks"))


def test_every_variant_is_measured_and_the_best_recipes_are_compared(tmp_path):
    import deploy
    import deploy_page

    given = ["--models", "tiny", "--precisions", "int8", "--norms", "layer", "folded", "--rounds", "2"]
    deploy.main([*given, "--out", str(tmp_path)])
    (path,) = tmp_path.glob("deploy-tiny-onnxruntime-1.json")
    rows = {(row["norm"], row["recipe"]): row for row in json.loads(path.read_text(encoding="utf8"))["rows"]}
    assert list(rows) == [(norm, recipe) for recipe in ("products", "stream") for norm in ("layer", "folded")]
    best = [row for row in rows.values() if row["is_best"]]
    assert [row["norm"] for row in best].count("layer") == 1
    fastest = next(row for row in best if row["norm"] == "layer")
    assert fastest["to_best"]["median"] == fastest["to_same"]["median"] == 1
    for row in rows.values():
        assert row["obstacle"], "two rounds allow no verdict"
        assert row["cosine"] > 0.9
        assert row["file_mb"] > 0
        assert row["memory_mb"] > 0
    assert rows["folded", "stream"]["dequantize"] < rows["layer", "stream"]["dequantize"]
    assert "too few rounds" in deploy_page.inference(tmp_path)


def test_the_pages_are_those_of_the_results():
    import deploy_page
    import integers

    assert (ROOT / "docs" / "inference.md").read_text(encoding="utf8") == deploy_page.inference()
    page = (ROOT / "docs" / "deploying.md").read_text(encoding="utf8")
    assert deploy_page.headline() in page
    assert deploy_page.headline() in (ROOT / "README.md").read_text(encoding="utf8")
    assert integers.table() in page
