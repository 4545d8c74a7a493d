"""`normkit bench` and the modules that measure: turns, verdicts, rows, pictures, errors."""

import csv
import os
import sys
import types
from pathlib import Path

import pytest
import torch
from normkit_papers import timing
from normkit_papers.cli import main
from normkit_papers.norm_speed import explain, measure, moves, skip_warmup
from normkit_papers.op_counter import Counter
from normkit_papers.report import speed

from normkit.norms import make

FEW = ("--shape", "16x8", "--rounds", "2", "--norms", "layer", "un(window=2)")
GPU = [
    {"rows": n, "channels": c, "dtype": "bf16", "side": side, "run": run, "ms": 1, "of_ceiling": 0.5 + c / 10000}
    for n in (64, 128)
    for c in (512, 4096)
    for side in ("forward", "backward")
    for run in ("layer ours", "power ours")
]


@pytest.fixture
def typed(capsys):
    def run(*words):
        capsys.readouterr()
        try:
            status = main(["bench", *map(str, words)])
        except SystemExit as ended:
            status = ended.code
        return status, *capsys.readouterr()

    return run


def table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_variants_take_turns_and_the_first_one_runs_twice():
    order = []
    timings = timing.measure({name: lambda name=name: order.append(name) for name in "ab"}, 57)
    rounds = ["".join(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert len(rounds) == 57 + timing.WARMUP
    assert all(sorted(each) == ["a", "a", "b"] for each in rounds)
    assert min(rounds.count(each) for each in ("aab", "aba", "baa")) > 10, "a fixed order favours a variant"
    assert [len(seconds) for seconds in (*timings.seconds.values(), timings.repeated)] == [57, 57, 57]


def test_views_of_every_kind_are_no_operations():
    with Counter() as count:
        torch.ones(4, 4).view(2, 8).as_strided((2, 2), (1, 2)).diagonal()
    assert count.operations == 1


def test_a_ratio_is_taken_within_a_round():
    slow = [1.0, 10.0, 100.0]  # a machine that gets slower and slower: no difference between the two
    assert timing.ratio([2 * s for s in slow], slow) == timing.Ratio(2, 2, 2, 3)


def test_ratio_is_the_median_over_rounds():
    a, b = [1.0, 2.0, 30.0, 4.0, 5.0], [1.0, 1.0, 10.0, 1.0, 1.0]
    timings = timing.Timings({"a": a, "b": b}, a)
    assert timings.ratio("a", "b") == timing.Ratio(3.0, 1.8, 4.2, 5)
    assert timings.median("a") == 4.0


@pytest.mark.parametrize(
    ("repeated", "rounds", "expected"),
    [
        (1.0, 60, ""),
        (1.019, 60, ""),
        (1.03, 60, "this machine is too noisy: a variant took 1.03 of its own time"),
        (0.9, 60, "this machine is too noisy: a variant took 0.90 of its own time"),
        (1.0, 59, "a verdict needs at least 60 rounds; got 59"),
    ],
)
def test_a_verdict_needs_a_quiet_machine_and_enough_rounds(repeated, rounds, expected):
    timings = timing.Timings({"slow": [1.0] * rounds, "fast": [0.8] * rounds}, [repeated] * rounds)
    assert timings.obstacle == expected


def test_single_thread_is_pinned_while_measuring():
    before, seen = os.sched_getaffinity(0), []
    timing.measure({"a": lambda: seen.append((os.sched_getaffinity(0), torch.get_num_threads()))}, 1)
    assert {(len(cores), threads) for cores, threads in seen} == {(1, 1)}
    assert os.sched_getaffinity(0) == before


def test_rows_of_a_measurement():
    rows = measure(["rms", "batch", "power(groups=0)"], 16, 8, rounds=2)
    found = {(row["provider"], row["norm"], row["pass"]) for row in rows}
    assert found == {
        ("torch", "nn.LayerNorm", "train"), ("normkit", "rms", "train"), ("torch", "rms", "train"),
        ("normkit", "batch", "train"), ("torch", "batch", "train"), ("normkit", "power(groups=0)", "train"),
        ("torch", "nn.LayerNorm", "inference"), ("normkit", "batch", "inference"),
        ("normkit", "power(groups=0)", "inference"),
    }  # fmt: skip
    assert all(row["low"] <= row["ratio"] <= row["high"] and row["ms"] > 0 for row in rows)
    assert [moves(spec) for spec in ("layer", "un", "power")] == [5, 8, 5]


def test_a_norm_is_measured_after_its_warm_up():
    norm = skip_warmup(make("power(groups=0)", 4))
    before = norm.running.clone()
    x = torch.full((6, 4), 3.0)
    assert torch.allclose(norm(x), x * torch.rsqrt(before + norm.eps))  # by the past, not by the batch


@pytest.mark.parametrize("spec", ["layer", "scale", "batch", "pnv"])
def test_explained_is_what_a_count_counts(spec):
    (row,) = explain(spec, 16, 8)
    norm, x, dy = make(spec, 8), torch.randn(16, 8, requires_grad=True), torch.randn(16, 8)
    norm(x).backward(dy)
    with Counter() as forward:
        y = norm(x)
    with Counter() as backward:
        torch.autograd.grad(y, [x, *norm.parameters()], dy)
    assert (row["forward"], row["backward"]) == (forward.operations, backward.operations)
    assert all(what.startswith(("native ", "fused ")) for what in row["ran"].split(", "))


def test_bench_measures_and_draws(typed, tmp_path):
    status, out, err = typed(*FEW, "--out", tmp_path / "made")
    assert (status, err) == (0, "")
    assert "nn.LayerNorm  1.00 (1.00-1.00)" in out
    assert "No verdict: a verdict needs at least 60 rounds; got 2" in out
    assert "un(window=2)" in out
    assert "un(window=2)" in (tmp_path / "made" / "ratios.svg").read_text()
    again, shown, _ = typed(tmp_path / "made")  # from the file, without a clock
    assert again == 0
    assert shown.splitlines() == out.splitlines()[: len(shown.splitlines())]


def test_bench_draws_bandwidth_against_channels(typed, tmp_path):
    table(tmp_path / "speed.csv", GPU)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    status, _, _ = typed(tmp_path, "--out", tmp_path / "made")
    assert status == 0
    svg = (tmp_path / "made" / "bandwidth.svg").read_text()
    for text in ("power ours", "forward bf16", "4096", "fraction of a copy"):
        assert text in svg


def test_peers_are_measured_where_they_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import peers

    package = types.ModuleType("torchnorm")
    package.__dict__["_triton"] = inner = types.ModuleType("torchnorm._triton")
    inner.__dict__["fused_rms_norm"] = lambda x, w, eps: ("theirs", x, w, eps)
    monkeypatch.setitem(sys.modules, "torchnorm", package)
    monkeypatch.setitem(sys.modules, "torchnorm._triton", inner)
    x, w = torch.ones(2, 4), torch.ones(4)
    found = peers.providers("rms", compiled=False)
    assert found["torchnorm"](x, w, None, 1e-5) == ("theirs", x, w, 1e-5)
    assert torch.equal(found["torch"](x, w, None, 1e-5), torch.nn.functional.rms_norm(x, (4,), w, 1e-5))
    assert "torchnorm" not in peers.providers("layer", compiled=False)
    assert {who for _, who in peers.PEERS} == {"liger", "flash", "apex", "quack", "torchnorm"} == set(peers.PACKAGES)


def test_bench_explains_without_a_clock(typed):
    status, out, _ = typed("--explain", "--shape", "16x8", "--norms", "batch", "power(groups=0)")
    assert status == 0
    assert "native moments" in out or "fused moments" in out
    assert "warming up" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--shape", "12"], "rows x channels"),
        (["--norms", "lay"], "did you mean 'layer'"),
        (["--rounds", "0"], "--rounds must be a whole number >= 1; got 0"),
        (["--threads", "99999"], "--threads must be at most 1024; got 99999"),
        (["--explain", "--out", "x"], "--explain measures nothing that could be written; leave out --out"),
        ([".", "--explain", "--rounds", "3"], ". is read and nothing measured: leave out --explain and --rounds"),
        (["--dtype", "fp8"], "float32"),
        (["nowhere"], "there is no file or folder nowhere"),
    ],
)
def test_bad_input_is_one_line(typed, words, message):
    status, out, err = typed(*words)
    assert (status, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        "norm,shape,dtype,ms,low,ratio,high\nx,8x4,f,1,1,much,1\n",
        "\x00\xff",
        "norm,shape,dtype,ms,low,ratio,high,noise\nx,8x4,f,1,1,1,1,1.5\n",
        "norm,shape,dtype,ms,low,ratio,high,noise,rounds\nx,8x4,f,1,1,1,1,x,60\n",
        "rows,channels,dtype,side,run,ms,of_ceiling\n8,64.0,f,forward,un,1,1\n",
    ],
)
def test_files_that_hold_no_timings_are_refused(text, tmp_path):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(ValueError, match="holds no timings"):
        speed.read(tmp_path / "x.csv")
