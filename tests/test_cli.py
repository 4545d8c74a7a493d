"""The command `normkit`: output, exit status, errors of one line."""

import csv
import subprocess
import sys

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.cli import main
from normkit.fold import folders
from normkit.models import Exported


def failed(capsys, *words):
    """Standard error of a command line that is refused: one line, status 2."""
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    assert status == 2
    assert captured.out == ""
    assert captured.err.startswith("normkit")
    assert captured.err.count("\n") == 1
    return captured.err


def test_list_names_every_norm(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in nk.NORMS)


def test_bench_writes_its_rows(capsys, tmp_path):
    assert main(["bench", "un", "--shape", "8x4", "--rounds", "2", "--out", str(tmp_path / "t.csv")]) == 0
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["norm"] for row in rows} == {"nn.LayerNorm", "un"}
    assert {row["shape"] for row in rows} == {"8x4"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["lsit"], "lsit"), ([], "COMMAND"), (["bench"], "NORM"), (["bench", "laier"], "laier"),
        (["bench", "un", "--shape", "8"], "'8'"), (["bench", "un", "--rounds", "0"], "'0'"),
        (["bench", "un", "--dtype", "int8"], "int8"), (["audit", "nowhere"], "nowhere"), (["fold", "nowhere"], "--out"),
        (["diagnose", "nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_that_names_what_was_given(capsys, words, named):
    assert named in failed(capsys, *words)


def test_diagnose_ends_with_1_where_it_finds_a_fault(capsys, tmp_path):
    """A channel that grows without end in one of two trainings."""
    for name, factor, status in (("healthy", 1.0, 0), ("exploding", 30.0, 1)):
        torch.manual_seed(0)
        model = nk.convert(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)), "un(warmup=2)")
        with nk.record(model, to=tmp_path / f"{name}.csv", every=1):
            for step in range(40):
                model(torch.randn(256, 8) * factor**step).square().mean().backward()
                model.zero_grad()
        assert main(["diagnose", str(tmp_path / f"{name}.csv")]) == status, capsys.readouterr().out
        assert capsys.readouterr().out


def test_the_command_is_installed():
    done = subprocess.run(
        [sys.executable, "-m", "normkit.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"normkit {nk.__version__}\n"


@pytest.mark.parametrize(("cosine", "warned"), [(None, False), (0.99, False), (0.2, True)])
def test_export_warns_of_integers_far_from_the_model(cosine, warned, capsys, tmp_path, monkeypatch):
    made = Exported(tmp_path / "m.onnx", {}, "onnxruntime", 0.1, cosine)
    monkeypatch.setattr("normkit.models.huggingface.load_pretrained", lambda folder: nn.LayerNorm(3))
    monkeypatch.setattr(folders, "example_for", lambda model: {})
    monkeypatch.setattr("normkit.models.export", lambda *_, **__: made)
    assert main(["export", "folder", "--out", str(tmp_path / "m.onnx")]) == 0
    assert ("warning" in capsys.readouterr().out) == warned
