"""Tables of studies: counts, and the remarks on them."""

import json
import math
import pathlib
import shutil

import image_files
import pytest
from test_study import TOY, put

from normkit.lab.metrics import STUDY_METRICS
from normkit.lab.papers.unified import throughput
from normkit.lab.recipes import cifar10_tiny_vit
from normkit.lab.studies import runner, similarity, table
from normkit.lab.studies.catalogue import STUDIES
from normkit.lab.study import Base, Column, Row, Study, expand, seeded
from normkit.lab.train.run import train
from normkit.watch import read_run


def test_a_copy_beside_the_seeds_is_no_seed(tmp_path):
    cell = expand(TOY, "pocket")[0]
    for seed in (0, 10):
        folder = put(cell, tmp_path, seed)
    for copy in ("seed-0-old", "seed-0.bak", "seed-00", "seed-", "old"):
        shutil.copytree(folder, folder.with_name(copy))
    made = table.collect(TOY, "pocket", tmp_path)
    assert [run["seed"] for run in made["rows"][1]["cells"][0]["runs"]] == [0, 10]


def test_table_names_our_data_and_share_of_the_test(tmp_path):
    per, shuffled, *_ = expand(TOY, "pocket")
    part = {"name": "x (a third of it)", "splits": {"train": {"lines": 9}, "test": {"lines": 6750}}}
    put(per, tmp_path, data=part, scores={"running": {"per": 10.0, "n": 1000}})
    put(per, tmp_path, 1, data=part, status="diverged at step 3", scores={})
    remark = "Data of ours: x (a third of it), scored on 1,000 of 6,750 test items."
    assert remark in table.remarks(table.collect(TOY, "pocket", tmp_path))
    put(shuffled, tmp_path, data={"name": "y", "splits": {"test": 50}}, scores={"running": {"per": 10.0, "n": 50}})
    remark = (
        "Data of ours: x (a third of it), scored on 1,000 of 6,750 test items (PER); "
        "y, scored on all 50 test items (PER, shuffled)."
    )
    assert remark in table.remarks(table.collect(TOY, "pocket", tmp_path))


def test_a_part_of_a_corpus_is_none_at_paper_scale(tmp_path, monkeypatch):
    folder = tmp_path / "iwslt14_de_en"
    folder.mkdir()
    for split in ("train_partial", "valid", "test"):
        for side in ("de", "en"):
            (folder / f"{split}.{side}").touch()
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    study = STUDIES["core.iwslt14"]
    assert runner.plan(study, "pocket", tmp_path / "out").missing == ()
    with pytest.raises(
        ValueError, match=r"in part alone \(53,561 of its 160,239 .*\), and scale paper is the original"
    ):
        runner.plan(study, "paper", tmp_path / "out")


def test_table_8_shows_what_was_measured_and_where(tmp_path, monkeypatch):
    made = table.collect(STUDIES["un.table8"], "pocket", tmp_path)
    shown = table.text(made)
    kept = json.loads((throughput.FOLDER / "swin-amd-epyc.json").read_text())
    eager = {row["norm"]: row["images_per_s"] for row in kept["rows"] if row["runtime"] == "eager"}
    assert [row["cells"][1]["mean"] for row in made["rows"]] == [eager["layer"], eager["folded"]]
    assert not any(cell["runs"] for row in made["rows"] for cell in (row["cells"][0], *row["cells"][2:]))
    where = kept["where"]
    assert f"Device: {where['device']}, {where['threads']} thread(s). Commit: {where['commit'][:9]}." in shown
    assert runner.plan(STUDIES["un.table8"], "pocket", tmp_path).todo == {}
    monkeypatch.setattr(throughput, "FOLDER", tmp_path)
    assert table.collect(STUDIES["un.table8"], "pocket", tmp_path)["rows"][0]["cells"][1]["runs"] == []
    with pytest.raises(ValueError, match="no runs at scale pocket"):
        runner.plan(STUDIES["un.table8"], "pocket", tmp_path)


def test_similarity_is_measured_once_against_the_first_row(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    image_files.write_cifar(tmp_path / "cifar10")
    tiny = {"steps": 2, "batch_tokens": 8, "warmup": 1, "model.width": 8, "model.depth": 1, "model.hidden": 8}
    base = {"pocket": Base("tiny", cifar10_tiny_vit, {**tiny, "images.held_out": 4})}
    column = Column(title="CKA", metric="cka", base=base)
    rows = (Row(label="LN", settings={}), Row(label="BN", settings={"model.norm": "batch"}))
    study = Study(id="s", title="similarity", columns=(column,), rows=rows)
    for cell in expand(study, "pocket"):
        folder, run = seeded(cell, tmp_path, 0)
        train(run, folder)
    monkeypatch.setattr(similarity, "BATCH", 10)
    for _ in range(2):
        similarity.add_similarity(study, "pocket", tmp_path)
    series = read_run(folder).of("cka")
    assert {len(one.values) for one in series.values()} == {1}
    means = [row["cells"][0]["mean"] for row in table.collect(study, "pocket", tmp_path)["rows"]]
    assert means[0] == pytest.approx(1)
    assert 0 < means[1] < 0.999


def test_curves_of_an_early_stopped_run_end_at_its_last_step():
    run = {
        "run": {"steps": 5000},
        "curve": [{"step": step, "train_loss": float(step == 90)} for step in range(10, 101, 10)],
        "valid": [{"step": 25, "accuracy": 85.0}],
        "seconds": {"train": 600.0},
        "scores": {"running": {"smoothed_perplexity": 3.0}},
    }
    run["curve"][-1]["train_loss"] = 2.0
    read = {
        name: STUDY_METRICS[name].read(pathlib.Path(), run)
        for name in ("perplexity train", "minutes to 80%", "perplexity smoothed")
    }
    assert read == {"perplexity train": math.exp(2.0), "minutes to 80%": 2.5, "perplexity smoothed": 3.0}


def test_perplexity_of_a_loss_beyond_all_bounds_is_a_number():
    run = {"run": {"steps": 10}, "curve": [{"step": 10, "train_loss": 1e4}], "valid": [{"step": 10, "loss": 1e4}]}
    for name in ("perplexity train", "perplexity valid"):
        assert STUDY_METRICS[name].read(pathlib.Path(), run) == math.exp(700)


def test_rows_of_other_papers_run_where_models_support_them():
    found = {}
    for label in ("Transformer", "DS-Init", "Fixup-Init", "Transformer + LayerDrop"):
        run = expand(STUDIES["pn.table1"], "paper", [label])[0].run.model
        found[label] = (run.placement, run.norm, run.norm_at, run.init, run.layer_drop)
    assert found == {
        "Transformer": ("post", "layer", {}, "xavier", 0.0),
        "DS-Init": ("post", "layer", {}, "ds", 0.0),
        "Fixup-Init": ("pre", "nonorm(affine=True)", {}, "fixup", 0.0),
        "Transformer + LayerDrop": ("post", "layer", {}, "xavier", 0.2),
    }
