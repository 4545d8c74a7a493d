"""benchmarks/swin.py from end to end on tiny models.

Every variant, the files, the section of the page.
"""

import importlib.util
import json
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture(scope="module")
def swin():
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("torchvision is not installed")
    spec = importlib.util.spec_from_file_location("swin", ROOT / "benchmarks" / "swin.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_variant_is_measured_and_written(swin, tmp_path, capsys):
    page = tmp_path / "vision.md"
    before = "# Vision\n\n<!-- measured: table-8 -->\nwhat was here before\n<!-- /measured -->\n\nmore\n"
    page.write_text(before, encoding="utf8")
    given = ["--dry", "--runtimes", "eager", "--models", "swin_t", "mask_rcnn", "--precisions", "fp32"]
    swin.main([*given, "--out", str(tmp_path), "--page", str(page)])
    (path,) = tmp_path.glob("swin-*.json")
    result = json.loads(path.read_text(encoding="utf8"))
    rows = result["rows"]
    assert [(row["model"], row["norm"]) for row in rows] == [
        (m, n) for m in ("swin_t", "mask_rcnn") for n in swin.NORMS
    ]
    assert all(row["images_per_s"] > 0 and row["compiled_ratio"] is None for row in rows)
    assert all(row["likewise_low"] <= row["likewise_ratio"] <= row["likewise_high"] for row in rows)
    assert {row["likewise_ratio"] for row in rows if row["norm"] == "layer"} == {1.0}
    notes = [row["note"].split("; ") for row in rows if row["norm"] == "folded"]
    assert [note[0] for note in notes] == ["norms 9 folded", "norms 17 folded, 1 folded back"]
    assert notes[1][2].removeprefix("nms and roi_align: ") in ("compiled, torchvision's", "plain PyTorch, normkit's")
    printed = capsys.readouterr().out
    assert "(the paper, RTX 3090: +31.2% and -17.7%)" in printed
    assert "(the paper, RTX 3090: +24.2% and -6.1%)" in printed
    text = page.read_text(encoding="utf8")
    assert text.endswith("<!-- /measured -->\n\nmore\n")
    assert "what was here before" not in text
    assert text.count("| swin_t | fp32 | eager |") == len(swin.NORMS)
