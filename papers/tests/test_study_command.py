"""`normkit study`: listing, tables, bad input, missing data, pages, Ray addresses."""

import dataclasses
import sys

import pytest
from normkit_papers.cli import main
from normkit_papers.studies import runner
from normkit_papers.studies.catalogue import RECIPES, STUDIES
from normkit_papers.study import Base, Column
from test_study import ONE, Here, board


def test_the_command_lists_and_shows(tmp_path, capsys):
    assert main(["study", "--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in STUDIES)
    assert (main(["study"]), capsys.readouterr().out) == (0, listed)
    assert main(["study", "un.table8", "--show", "--scale", "gpu", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "ImageNet TPUT" in shown
    assert "Not yet run at scale gpu: all columns." in shown
    assert "It can be run at scale: pocket" in shown
    assert f"No folder {tmp_path / 'gpu'}: name the folder of the runs with --out." in shown


def test_help_with_a_closed_standard_output_prints_nothing(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(SystemExit) as ended:
        main(["study", "--help"])
    sys.stdout.close()
    assert not ended.value.code
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["pn.tabel2"], "did you mean 'pn.table2'?); there are"),
        (["core.cmudict", "--scale", "big"], "no scale 'big'"),
        (["core.cmudict", "--seeds", "0"], "seeds must be at least 1 and at most 1,000; got 0"),
        (["core.cmudict", "--seeds", "1000000000"], "seeds must be at least 1 and at most 1,000; got 1000000000"),
        (["core.cmudict", "--only", "laier"], "did you mean 'layer'"),
        (["tears.table6", "--only", "PostNorm + LN, published"], "published of tears.table6: the paper quotes these"),
        (["un.table8", "--scale", "gpu"], "un.table8 has no runs at scale gpu"),
        (["core.cmudict", "--processes", "0"], "processes must be at least 1"),
    ],
)
def test_bad_input_is_an_error_of_one_line(arguments, message, tmp_path, capsys):
    assert main(["study", *arguments, "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_runs_whose_data_is_not_here_are_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("NORMKIT_DATA", raising=False)
    assert main(["study", "core.multi30k", "--out", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "the corpus multi30k.de-en is not here" in error
    assert error.count("\n") == 1
    elsewhere = Column(title="BLEU", metric="bleu", base={"pocket": Base("m", RECIPES["mt_multi30k"])})
    plan = runner.plan(dataclasses.replace(ONE, columns=(*ONE.columns, elsewhere)), "pocket", tmp_path)
    assert {run.data for run in plan.todo.values()} == {"digits"}
    assert "multi30k.de-en" in plan.missing[0]


def test_a_study_writes_a_page_with_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(STUDIES, "one", ONE)
    monkeypatch.setattr(runner, "engine", lambda *_: Here())
    assert main(["study", "one", "--out", str(tmp_path)]) == 0
    page = tmp_path / "pocket" / "tables" / "one.html"
    assert f"report: {page}" in capsys.readouterr().out
    assert "one column, trained in moments" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "address"),
    [
        ([], None),
        (["--ray"], "local"),
        (["--ray", "--seeds", "2"], "local"),
        (["--ray", "10.0.0.1:6379"], "10.0.0.1:6379"),
    ],
)
def test_ray_takes_an_address_or_none(arguments, address, tmp_path, monkeypatch, capsys):
    addresses = []
    monkeypatch.setitem(STUDIES, "one", ONE)
    monkeypatch.setattr(runner, "engine", lambda plan, processes, ray, board: addresses.append(ray) or Here(["/tiny/"]))
    assert main(["study", "one", "--out", str(tmp_path), *arguments]) == 1, "what failed is error to scripts too"
    assert addresses == [address]
    assert "failed" in capsys.readouterr().out


def test_a_scale_that_needs_a_gpu_raises_without_one(tmp_path):
    plan = runner.plan(ONE, "paper", tmp_path)
    assert {run.device for run in plan.todo.values()} == {"cuda"}
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a GPU"):
            runner.engine(plan, 1, None, board())
