"""Tables of studies: counts, and the remarks on them."""

import json
import math
import pathlib
import shutil

import image_files
import pytest
from made_results import result
from normkit_papers.metrics import STUDY_METRICS
from normkit_papers.recipes import cifar10_tiny_vit
from normkit_papers.report import results
from normkit_papers.report.compare import compared
from normkit_papers.report.seeds import difference, pool
from normkit_papers.studies import runner, similarity, table
from normkit_papers.studies.catalogue import STUDIES
from normkit_papers.study import Base, Column, Row, Study, expand, seeded
from normkit_papers.train.run import train
from normkit_papers.unified import throughput
from test_study import TOY, put

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


def test_scores_that_are_not_finite_are_shown_and_allow_no_verdict(tmp_path):
    (cell, *_) = expand(TOY, "pocket")
    for seed, per in enumerate((math.nan, math.inf, 11.0)):
        put(cell, tmp_path, seed, scores={"running": {"per": per}})
    made = table.collect(TOY, "pocket", tmp_path)
    assert "nan (3)" in table.text(made)
    pooled = pool({seed: results.read(tmp_path / cell.folder / f"seed-{seed}") for seed in range(3)})
    assert [one["scores"]["running"] for one in pooled.values()] == [{"per": pytest.approx(math.nan, nan_ok=True)}]
    assert difference([math.nan, 1.0], [1.0, 2.0]) == "nan: a score is not finite"
    assert difference([1.0, 2.0], [math.inf, 2.0]) == "-inf: a score is not finite"


def test_a_run_without_scores_is_not_compared(tmp_path):
    for name, status in (("a", "done"), ("b", "diverged at step 4")):
        results.write(tmp_path / name, result(status=status))
    with pytest.raises(ValueError, match="b diverged at step 4, so it has no scores; compare runs that are done"):
        compared([tmp_path / "a", tmp_path / "b"])


def test_a_loss_that_overflows_is_a_perplexity():
    run = {"run": {"steps": 9}, "curve": [{"step": 9, "train_loss": 1e9}], "valid": [{"step": 5, "loss": 1.0}]}
    read = {name: STUDY_METRICS[f"perplexity {name}"].read for name in ("train", "valid")}
    assert read["train"](pathlib.Path(), run) > 1e300
    assert read["valid"](pathlib.Path(), {**run, "valid": [*run["valid"], {"step": 9, "loss": 1e9}]}) > 1e300
    last = read["valid"](pathlib.Path(), {**run, "valid": [*run["valid"], {"step": 9, "loss": math.nan}]})
    assert math.isnan(last), "not that of an earlier validation"


def test_recorded_values_that_are_not_finite_are_left_out(tmp_path):
    rows = [f"{step},a,batch,rms,{value}" for step, value in ((50, "nan"), (60, 1), (70, 3), (80, "inf"), (90, 2))]
    (tmp_path / "rows.csv").write_text("\n".join(["step,site,norm,quantity,value", *rows, ""]), encoding="utf8")
    run = {"run": {"steps": 100}, "curve": []}
    assert [STUDY_METRICS[name].read(tmp_path, run) for name in ("rms", "rms max", "rms outliers")] == [2.0, 3.0, 1.5]


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
