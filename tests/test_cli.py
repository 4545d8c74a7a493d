"""The command `normkit`, its exit status and errors of one line, and the timings of `normkit bench`."""

import csv
import os
import warnings

import pytest
import torch
from torch import nn

import normkit as nk
from normkit import bench
from normkit.cli import main


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


@pytest.mark.parametrize("before", [True, False])
def test_norms_of_an_imported_file_are_listed(capsys, tmp_path, before):
    own = "import normkit\nclass Mine(normkit.norms.RowNorm):\n    power: float = 2.5\nnormkit.NORMS['mine'] = Mine\n"
    (tmp_path / f"norms_of_mine_{before}.py").write_text(own)
    given = ["--import", str(tmp_path / f"norms_of_mine_{before}.py")]
    try:
        assert main([*given, "list"] if before else ["list", *given]) == 0
    finally:
        nk.NORMS.pop("mine", None)
    assert "power=2.5" in capsys.readouterr().out
    assert main(["list", "--import", str(tmp_path / "other.py")]) == 2


@pytest.mark.parametrize("saved", [True, False])
def test_an_interrupted_removal_says_how_to_go_on(capsys, monkeypatch, tmp_path, saved):
    def interrupt(*args, **kwargs):
        if saved:
            (tmp_path / ".removal").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr("normkit.cli.remove_norms_dir", interrupt)
    assert main(["remove-norms", "model", "--text", "text", "--out", str(tmp_path)]) == 130
    assert ("--resume" in capsys.readouterr().err) == saved


def test_bench_writes_its_rows(capsys, tmp_path):
    assert main(["bench", "un", "rms", "--shape", "8x4", "--rounds", "2", "--out", str(tmp_path / "t.csv")]) == 0
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    timed = {("nn.LayerNorm", "torch"), ("un", "normkit"), ("rms", "normkit"), ("rms", "torch")}
    for which in ("train", "inference"):
        assert {(row["norm"], row["provider"]) for row in rows if row["pass"] == which} == timed
    assert {row["shape"] for row in rows} == {"8x4"}
    assert all(float(row["ratio"]) == 1 for row in rows if row["norm"] == "nn.LayerNorm")
    assert all(float(row["low"]) <= float(row["ratio"]) <= float(row["high"]) for row in rows)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["lsit"], "lsit"), ([], "COMMAND"), (["bench"], "NORM"), (["bench", "laier"], "laier"),
        (["bench", "un", "--shape", "8"], "'8'"), (["bench", "un", "--rounds", "0"], "'0'"),
        (["bench", "un", "--out", "nowhere/t.csv"], "nowhere"),
        (["bench", "un", "--dtype", "int8"], "int8"), (["audit", "nowhere"], "nowhere"), (["fold", "nowhere"], "--out"),
        (["diagnose", "nowhere"], "nowhere"),
        (["bench", "un", "--norms"], "normkit bench --help"),
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


@pytest.mark.filterwarnings("default")
def test_a_warning_is_a_line(capsys, monkeypatch):
    monkeypatch.setattr("normkit.cli.list_", lambda _: warnings.warn("a\nb", stacklevel=1) or 0)
    assert main(["list"]) == 0
    assert capsys.readouterr().err == "normkit: warning: a b\n"


# -- timings: variants by turns, ratios within a round, verdicts on quiet machines alone -------------------------------


def test_variants_take_turns_and_the_first_one_runs_twice():
    calls = []
    runs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    timings = bench.measure(runs, rounds=4)
    turns = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(turns) == 4 + bench.WARMUP
    assert all(sorted(turn) == ["a", "a", "b"] for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1, "the order is drawn for each round"
    assert len(timings.repeated) == len(timings.seconds["b"]) == 4


@pytest.mark.parametrize(
    ("repeated", "rounds", "possible"), [(1.0, 60, True), (1.05, 60, False), (0.9, 60, False), (1.0, 59, False)]
)
def test_a_verdict_needs_a_quiet_machine_and_enough_rounds(repeated, rounds, possible):
    timings = bench.Timings({"a": [1.0] * rounds}, [repeated] * rounds)
    assert (timings.obstacle == "") is possible


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="cores cannot be chosen here")
def test_a_single_thread_is_pinned_while_measuring():
    before, during = os.sched_getaffinity(0), []
    bench.measure({"a": lambda: during.append(os.sched_getaffinity(0))}, rounds=1)
    assert all(len(cores) == 1 for cores in during)
    assert os.sched_getaffinity(0) == before
