"""Timings: variants by turns, ratios within a round, verdicts on quiet machines alone."""

import os

import pytest

from normkit import bench


def test_variants_take_turns_and_the_first_one_runs_twice():
    calls = []
    runs = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    timings = bench.measure(runs, rounds=4)
    turns = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert len(turns) == 4 + bench.WARMUP
    assert all(sorted(turn) == ["a", "a", "b"] for turn in turns)
    assert len({tuple(turn) for turn in turns}) > 1, "the order is drawn for each round"
    assert len(timings.repeated) == len(timings.seconds["b"]) == 4


def test_a_ratio_is_taken_within_a_round():
    found = bench.ratio([1.0, 10.0, 200.0], [2.0, 20.0, 100.0])  # the machine slowed down in between
    assert (found.median, found.rounds) == (0.5, 3)


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


def test_rows_of_norms_have_training_and_inference_where_statistics_are_frozen():
    rows = bench.measure_norms(["un", "rms"], 8, 4, rounds=2)
    assert {(row["pass"], row["norm"], row["provider"]) for row in rows} == {
        ("train", "nn.LayerNorm", "torch"), ("train", "un", "normkit"), ("train", "rms", "normkit"),
        ("train", "rms", "torch"), ("inference", "nn.LayerNorm", "torch"), ("inference", "un", "normkit"),
    }  # fmt: skip
    assert all(row["ratio"] == 1 for row in rows if row["norm"] == "nn.LayerNorm")
    assert all(row["ms"] > 0 and row["low"] <= row["ratio"] <= row["high"] for row in rows)
