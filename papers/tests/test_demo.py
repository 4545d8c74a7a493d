"""The demo: its plan, parallel processes, Ctrl-C, and folding at the end."""

import dataclasses
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from forked import Program
from normkit_papers.report import results
from normkit_papers.studies.demo import COMPARED, FINISH, compare, entries, slug, steps_for
from normkit_papers.studies.progress import Board
from normkit_papers.studies.workers import Workers
from normkit_papers.train.folder import load
from normkit_papers.train.progress import Progress
from rich.console import Console
from worker_jobs import answer, fail, wait_to_be_stopped

from normkit.norms import make
from normkit.norms._warmup import WarmupNorm

ROOT = Path(__file__).parents[2]


def board(console=None, titles=()):
    return Board(console or Console(quiet=True), list(titles), 8)


def test_runs_differ_in_their_norm_and_in_nothing_else(tmp_path):
    plan = entries(steps=100, seed=3, out=tmp_path)
    assert [entry.title for entry in plan] == [
        "layer", "scale + FixNorm", "un", "power(groups=0)", "pnv", "batch",
    ]  # fmt: skip
    settings = [entry.run for entry in plan]
    for run in settings:
        first = settings[0]
        for field in (
            "task",
            "data",
            "steps",
            "batch_tokens",
            "bucketing",
            "lr",
            "warmup",
            "seed",
            "clip",
            "precision",
        ):
            assert getattr(run, field) == getattr(first, field)
        for field in ("width", "hidden", "depth", "heads", "placement", "dropout"):
            assert getattr(run.model, field) == getattr(first.model, field)
    assert [run.model.fixnorm for run in settings] == [False, True, False, False, False, False]
    norms = [make(run.model.norm, 8) for run in settings]
    assert {norm.warmup for norm in norms if isinstance(norm, WarmupNorm)} == {"auto"}
    assert len({entry.folder for entry in plan}) == len(plan)
    assert all(not run.bucketing for run in (e.run for e in entries(COMPARED, bucketing=False)))


def test_a_warmup_that_is_given_stays():
    (entry,) = entries(("un(warmup=7, window=2)",), steps=100)
    assert make(entry.run.model.norm, 8).spec == "un(window=2, warmup=7)"
    assert slug(entry.title) == "un-warmup=7-window=2"


def test_three_norms_side_by_side_then_folded_and_timed(tmp_path, forked_workers):
    """A diverged norm is a row; the others are compared, and `un` is folded."""
    plan = entries(("layer", "un", "batch"), steps=8, out=tmp_path, test_items=20)
    for number, entry in enumerate(plan):
        run = dataclasses.replace(entry.run, model=dataclasses.replace(entry.run.model, depth=1), valid_items=50)
        plan[number] = dataclasses.replace(entry, run=run)
    plan[2] = dataclasses.replace(plan[2], run=dataclasses.replace(plan[2].run, lr=1e30, clip=0.0, warmup=0))
    reports = []

    class Ears(Board):
        def update(self, title, tick):
            reports.append((title, tick.stage))

        def end(self, title, outcome):
            reports.append((title, outcome))

    outcome = compare(plan, Ears(Console(quiet=True), [], 8), "as typed", rounds=5)
    assert not outcome.failed
    assert not outcome.interrupted
    assert [folder.name for folder in outcome.found] == ["layer", "un", "batch"]
    layer, un, batch = outcome.found.values()
    assert (layer["status"], un["status"]) == ("done", "done")
    assert batch["status"].startswith("diverged at step ")
    assert batch["scores"] == {}
    assert set(layer["scores"]) == {"running", "beam"}
    assert set(un["scores"]) == {"running", "donors", "calibrated", "beam", "folded"}
    assert un["scores"]["folded"]["per"] == pytest.approx(un["scores"]["running"]["per"], abs=1.0)
    assert un["scores"]["folded"]["loss"] == pytest.approx(un["scores"]["running"]["loss"], rel=1e-4)
    assert un["fold"]["foldable"] == "7 of 7"
    assert un["fold"]["max_error"] < 1e-9
    assert layer["fold"]["foldable"] == "0 of 7"
    assert [(pair["a"], pair["b"]) for pair in un["timing"]["pairs"]] == [
        ("un folded", "un"), ("un folded", "layer"), ("un", "layer"),
    ]  # fmt: skip
    assert all(result["speed"]["inference_words_per_s"] > 0 for result in (layer, un))
    assert all(result["where"]["threads"] == 1 for result in (layer, un))
    assert {title for title, _ in reports} == {"layer", "un", "batch", FINISH}
    assert ("batch", batch["status"]) in reports
    assert results.read(plan[1].folder)["timing"] == un["timing"]
    load(plan[1].folder / "folded")
    assert multiprocessing.active_children() == []


def test_minutes_choose_the_steps(tmp_path, monkeypatch, forked_workers):
    plan = entries(("layer", "pnv"), steps=400, out=tmp_path)
    steps = steps_for(60, plan, board())
    assert steps > 200
    assert list(tmp_path.iterdir()) == [], "measuring leaves nothing behind"
    monkeypatch.setattr(Workers, "submit", lambda self, title, *_: self._jobs.update({title: title}))
    monkeypatch.setattr(
        Workers, "ended", lambda self: ((title, 0.01) for title in [self._jobs.popitem()[0] for _ in [*self._jobs]])
    )
    with pytest.raises(ValueError, match=r"--minutes 0\.001 is too short for 2 norms here; needs about"):
        steps_for(0.001, plan, board())


# -- processes -------------------------------------------------------------------------------------------------------


def test_workers_tell_return_and_fail():
    ticks, before = [], {child.pid for child in multiprocessing.active_children()}  # of data loaders of other tests
    with Workers(2, lambda title, tick: ticks.append((title, tick.stage))) as workers:
        workers.submit("a", answer, "yes")
        workers.submit("b", fail)
        ended = dict(workers.ended())
    assert ended["a"] == "YES"
    assert isinstance(ended["b"], ValueError)
    assert str(ended["b"]) == "b cannot be"
    assert ticks == [("a", "yes")]
    assert {child.pid for child in multiprocessing.active_children()} <= before


def test_stopped_workers_end_and_the_rest_never_starts():
    def ticks(title, tick):
        workers.stop()

    with Workers(1, ticks) as workers:
        for title in ("a", "b", "c", "d"):
            workers.submit(title, wait_to_be_stopped)
        ended = dict(workers.ended())
    assert set(ended.values()) == {"stopped"}
    assert "a" in ended
    assert "d" not in ended


# The command line, as a shell starts it, but workers are forked: each new Python would import Lightning.
DEMO = """
import multiprocessing, signal, sys
from normkit_papers.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
forks = multiprocessing.get_context("fork")
multiprocessing.get_context = lambda method: forks
sys.exit(main())
"""


def test_ctrl_c_ends_the_children_and_keeps_what_is_there(tmp_path):
    process = Program(DEMO, "demo", "--steps", "10000", "--norms", "layer", "un", "pnv", "--out", str(tmp_path))
    _wait(lambda: "step 1 of 10,000" in process.printed(), "the demo began no training")
    children = _children(process.pid)
    assert len(children) >= 2
    os.kill(process.pid, signal.SIGINT)
    status, out, err = process.ended(240)
    assert status == 130, err
    assert "Traceback" not in err
    assert "what is finished is kept" in out
    assert "interrupted" in out
    assert (tmp_path / "report.html").exists()
    kept = results.find([tmp_path])
    assert all(result["status"].startswith("interrupted at step ") for result in kept.values())
    assert len(kept) == 2, "the third never started"
    _wait_until_gone(children)


def test_children_do_not_outlive_their_parent():
    code = """
from worker_jobs import wait_to_be_stopped
from normkit_papers.studies.workers import Workers
if __name__ == "__main__":
    with Workers(1, lambda title, tick: print(tick.stage, flush=True)) as workers:
        workers.submit("a", wait_to_be_stopped)
        list(workers.ended())
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, cwd=ROOT / "tests", stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        children = _children(process.pid)
        assert children
        process.kill()
    _wait_until_gone(children)


def _wait_until_gone(children):
    """Wait until processes ended; Python's resource tracker ends after its parent."""
    _wait(lambda: not any(map(_runs, children)), "a child outlived its parent", 30)


def _wait(condition, failure, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, failure
        time.sleep(0.05)


def _runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _children(pid):
    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# -- what is shown ---------------------------------------------------------------------------------------------------


class InterruptedConsole(Console):
    """Receives Ctrl-C as it begins to print its first line."""

    def __enter__(self):
        entered = super().__enter__()
        if not self.__dict__.setdefault("interrupted", False):
            self.interrupted = True
            signal.raise_signal(signal.SIGINT)
        return entered


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="Ctrl-C is ignored by what runs behind")
def test_ctrl_c_within_a_line_comes_after_it_and_the_next_lines_are_shown(capsys):
    shown = board(InterruptedConsole())
    with pytest.raises(KeyboardInterrupt):
        shown.end("un", "done")
    shown.print("stopping")
    assert [line.split("] ")[-1] for line in capsys.readouterr().out.splitlines()] == ["un: done", "stopping"]


def test_progress_is_plain_lines_where_there_is_no_terminal(capsys):
    with Board(Console(width=40), ["un"], 100) as shown:
        for step in range(1, 101):
            shown.update("un", Progress("training", step, 100, 1.5, 30_000.0, 65.0))
        shown.update("un", Progress("decoding", 100, 100))
        shown.end("un", "done, PER 9.9")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 13, "the first step, each tenth, one more stage, the end"
    assert lines[0].endswith("un: step 1 of 100   loss 1.500   30,000 tokens/s   1:05 left")
    assert lines[-2:] == ["[0:00] un: decoding ...", "[0:00] un: done, PER 9.9"]
    assert not any("\x1b" in line for line in lines)


def test_progress_is_live_in_a_terminal():
    console = Console(force_terminal=True, width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123
    with Board(console, ["layer of [/my] data", "un"], 100) as shown:
        shown.update("un", Progress("training", 50, 100, 1.5, 30_000.0, 65.0))
        shown.end("un", "done, PER 9.9")
    console.file.close()
    text = console.export_text()
    assert "layer of [/my] data" in text, "brackets are no markup"
    assert "waiting" in text
    assert "done, PER 9.9" in text
