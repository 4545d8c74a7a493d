"""The command `papers`, as it is typed: status, files, one line for an error."""

import dataclasses
import os
import shutil
import signal
import sys
import time

import pytest
from forked import Program
from normkit_papers import results
from normkit_papers.cli import COMMANDS, main
from normkit_papers.recipes import RECIPES
from normkit_papers.report import summary
from normkit_papers.studies import demo as demo_module
from normkit_papers.studies import rows
from normkit_papers.studies.catalogue import STUDIES
from normkit_papers.study import Base, Column, Study, TableRow
from normkit_papers.train.folder import checkpoints, load

import normkit

SHORT = [
    "train", "vit_digits", "--model.width", "8", "--model.hidden", "8", "--model.depth", "1", "--model.heads", "1",
    "--batch-tokens", "16", "--steps", "4", "--warmup", "1", "--valid-every", "0", "--record-every", "0",
]  # fmt: skip
FAST = {"steps": 4, "batch_tokens": 16, "warmup": 1, "model.depth": 1}
TOY = Study(
    id="toy",
    title="trained in moments",
    rows=(TableRow("LN", {}, ("81.3",)), TableRow("UN", {"model.norm": "un"}, ("81.0",))),
    columns=(Column("digits", "accuracy", {"pocket": Base("t", RECIPES["vit_digits"], FAST)}),),
)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The demo with few steps, words and rounds, of two norms."""
    out, recipe, fold = tmp_path_factory.mktemp("demo"), RECIPES["g2p_cmudict"](), demo_module.fold_and_time
    small = dataclasses.replace(recipe, test_items=20, valid_items=20, batch_tokens=100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RECIPES, "g2p_cmudict", lambda: small)
        patch.setattr(demo_module, "fold_and_time", lambda folders: fold(folders, rounds=3))
        assert main(["demo", "--norms", "layer", "un", "--steps", "12", "--processes", "1", "--out", str(out)]) == 0
    return out


def test_the_demo_folds_one_norm_and_times_all(demo):
    assert {path.name for path in demo.iterdir()} == {"layer", "un", "report.html"}
    layer, un = (results.read(demo / name) for name in ("layer", "un"))
    assert {**layer["run"], "name": 0, "model": 0} == {**un["run"], "name": 0, "model": 0}
    assert (layer["fold"]["foldable"], un["fold"]["foldable"]) == ("0 of 12", "12 of 12")
    assert un["fold"]["max_error"] < 1e-12
    assert un["scores"]["folded"]["per"] == pytest.approx(un["scores"]["running"]["per"], abs=0.2)
    assert min(un["fold"]["seconds_folded"], layer["fold"]["seconds_trained"]) > 0
    assert 0 < un["fold"]["megabytes_folded"] < un["fold"]["megabytes_trained"]
    assert load(demo / "un" / "folded").run.model.norm == "nonorm"


def test_a_run_takes_a_norm_of_ones_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "norms_of_ones_own.py"
    path.write_text("import normkit\nnormkit.NORMS['mine'] = normkit.NORMS['layer']\n")
    try:
        assert main([*SHORT, "--import", str(path), "--model.norm", "mine", "--out", str(tmp_path / "run")]) == 0
        assert results.read(tmp_path / "run")["run"]["model"]["norm"] == "mine"
    finally:
        normkit.NORMS.pop("mine", None)
    capsys.readouterr()
    assert main(["use", "fold", str(tmp_path / "run"), "--out", str(tmp_path / "folded")]) == 2
    assert "--import" in capsys.readouterr().err
    assert main([*SHORT, "--import=no_such_module", "--out", str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


def test_overview_and_help_of_every_command(capsys):
    assert len(COMMANDS) == 6
    assert main([]) == 2
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"papers {name} " in overview for name in COMMANDS)
    uses = [["use", name] for name in ("translate", "fold")]
    for command in (*([name] for name in COMMANDS if name not in ("train", "use")), *uses):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--help"])
        assert not ended.value.code
        assert "usage" in capsys.readouterr().out


def test_lists_name_what_runs_here_and_where_missing_data_is(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    assert main(["train"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "runs here" in next(line for line in lines if line.startswith("vit_digits "))
    assert "lacks multi30k.de-en" in next(line for line in lines if line.startswith("mt_multi30k "))
    assert any(line.startswith("  multi30k.de-en: ") for line in lines)
    assert main(["study", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "pocket: runs here" in next(line for line in lines if line.startswith("core.cmudict "))
    assert "pocket: lacks iwslt14.de-en" in next(line for line in lines if line.startswith("un.table9 "))
    assert "benchmarks/un_table8.py" in next(line for line in lines if line.startswith("un.table8 "))
    assert all(len(line) <= 120 for line in lines[: lines.index("missing data:")])


def test_a_study_is_run_shown_continued_and_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STUDIES, "toy", TOY)
    typed = ["study", "toy", "--out", str(tmp_path)]
    assert main([*typed, "--only", "layer"]) == 0
    assert "1 runs to train, 0 finished" in capsys.readouterr().out
    assert main(["reproduce", "--only", "toy", "--seeds", "2", "--processes", "1", "--out", str(tmp_path)]) == 0
    assert "3 runs to train, 1 finished" in capsys.readouterr().out
    assert (tmp_path / "toy.html").read_text().count("<td>81.") == 2
    assert main([*typed, "--show"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("(2)") == 2
    assert str(tmp_path / "toy.csv") in shown


def test_show_without_a_run_is_from_the_kept_results(tmp_path, capsys, monkeypatch):
    assert main(["study", "pn.table2", "--show", "--out", str(tmp_path)]) == 0
    assert "results/pn.table2.csv" in capsys.readouterr().out
    monkeypatch.setattr(rows, "KEPT", tmp_path)
    assert main(["study", "tears.table2", "--show", "--out", str(tmp_path)]) == 0
    assert "no run at scale pocket yet" in capsys.readouterr().out


def test_several_seeds_train_into_folders_and_finished_ones_are_kept(tmp_path):
    assert main([*SHORT, "--seeds", "2", "--out", str(tmp_path)]) == 0
    found = results.find([tmp_path])
    assert {path.name: made["run"]["seed"] for path, made in found.items()} == {"seed-0": 0, "seed-1": 1}
    before = (tmp_path / "seed-0" / "result.json").stat().st_mtime_ns
    assert main([*SHORT, "--seeds", "3", "--resume", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "seed-0" / "result.json").stat().st_mtime_ns == before
    assert len(results.find([tmp_path])) == 3


def test_a_run_that_diverges_is_a_failure(tmp_path, capsys):
    assert main([*SHORT, "--lr", "1e30", "--clip", "0", "--out", str(tmp_path)]) == 1
    assert "diverged at step" in capsys.readouterr().err


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="background processes ignore Ctrl-C")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_training_with_a_checkpoint(number, status, tmp_path):
    command = [*SHORT, "--steps", "20000", "--checkpoint-every", "20000", "--out", str(tmp_path)]
    program = Program("import sys; from normkit_papers.cli import main; sys.exit(main())", *command)
    while not (tmp_path / "run.json").exists():
        time.sleep(0.1)
    time.sleep(1)
    os.kill(program.pid, number)
    code, _, error = program.ended(240)
    assert code == status, error
    assert "Traceback" not in error
    assert results.read(tmp_path)["status"].startswith("interrupted at step ")
    assert len(checkpoints(tmp_path)) == 1


def test_runs_are_used(demo, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", ["hello\n", "\n", "world\n"])
    assert main(["use", "translate", str(demo / "un")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert (len(said), said[1]) == (3, "")
    assert main(["use", "fold", str(demo / "un"), "--out", str(tmp_path / "folded")]) == 0
    assert "12 of 12 norms fold away" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", ["hello\n", "\n", "world\n"])
    assert main(["use", "translate", str(tmp_path / "folded")]) == 0
    assert capsys.readouterr().out.splitlines() == said
    assert main(["use", "fold", str(demo / "un"), "--out", str(tmp_path / "folded")]) == 2, "a model is there"
    capsys.readouterr()
    monkeypatch.setattr("sys.stdin", ["good\n", "b4d\n"])
    assert main(["use", "translate", str(demo / "un")]) == 2
    assert "line 2" in capsys.readouterr().err


def test_reports_of_runs_rows_and_figures(demo, tmp_path, capsys):
    assert main(["report", str(demo), "--out", str(tmp_path / "a.html")]) == 0
    assert main(["report", str(demo / "un" / "rows.csv"), "--out", str(tmp_path / "b.html")]) == 0
    assert main(["report", str(demo), "--figure", "tears.figure2", "--out", str(tmp_path / "c.html")]) == 0
    assert all((tmp_path / f"{name}.html").stat().st_size > 1e6 for name in "abc"), "with plotly's script"
    assert main(["report", "--figure", "list"]) == 0
    capsys.readouterr()
    assert main(["report", str(demo / "layer"), str(demo / "un"), "--compare"]) == 0
    assert {"layer", "un"} <= set(capsys.readouterr().out.split())
    shutil.copytree(demo / "un", tmp_path / "un", ignore=shutil.ignore_patterns("result.json", "*.safetensors"))
    assert main(["report", str(demo / "layer"), str(tmp_path / "un"), "--compare"]) == 0
    assert f"not ended: {tmp_path / 'un'}" in capsys.readouterr().err
    copy = shutil.copytree(demo / "un", tmp_path / "copy")
    assert [len(each.results) for each in summary.groups(results.find([demo / "un", copy])).popitem()[1]] == [1]


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        (["repport"], "'report'"),
        (["study", "pn.tabel1"], "'pn.table1'"),
        (["study", "un.table9", "--only", "LN"], "'LN'"),
        (["study", "un.table8"], "un_table8.py"),
        (["study", "core.cmudict", "--seeds", "0"], "--seeds"),
        (["demo", "--norms", "un", "un"], "'un'"),
        (["demo", "--norms", "unn"], "unn"),
        (["train", "vit_digit"], "'vit_digits'"),
        ([*SHORT, "--seeds", "0"], "--seeds"),
        (["report"], "no path"),
        (["report", "--figure", "pn.figure9"], "pn.figure"),
        (["report", "/nowhere"], "/nowhere"),
        (["report", "/nowhere.csv"], "/nowhere.csv"),
        (["use", "translate", "/nowhere"], "/nowhere"),
        (["use", "translte"], "'translate'"),
    ],
)
def test_bad_input_is_one_line_and_status_2(typed, named, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(typed) == 2
    error = capsys.readouterr().err
    assert named in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
