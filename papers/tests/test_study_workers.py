"""Workers of studies that are killed.

Lost runs start again, and fail if they kill each time.
"""

import functools
import multiprocessing
import threading

import pytest
from normkit_papers.cli import main
from normkit_papers.report import results
from normkit_papers.studies import runner, table, workers
from normkit_papers.studies.catalogue import RECIPES, STUDIES
from normkit_papers.studies.progress import Board
from normkit_papers.studies.workers import Workers
from normkit_papers.study import Base, Column, Row, Study, expand
from normkit_papers.train.run import train
from rich.console import Console
from test_study import ONE, put
from worker_jobs import die, kill_one, noted_job

TINY = {"steps": 30, "batch_tokens": 16, "model.depth": 1, "checkpoint_every": 5, "keep": 2, "warmup": 2}
STUDY = Study(
    id="toy",
    title="two norms side by side",
    rows=(Row(label="LN", settings={}), Row(label="UN", settings={"model.norm": "un"})),
    columns=(Column(title="accuracy", metric="accuracy", base={"pocket": Base("tiny", RECIPES["vit_digits"], TINY)}),),
)


@pytest.mark.slow
def test_runs_resume_after_a_killed_process(tmp_path, monkeypatch, forked_workers):
    monkeypatch.setattr(runner, "study_job", noted_job)
    plan = runner.plan(STUDY, "pocket", tmp_path)
    layer, un = plan.todo
    for folder in (layer, un):
        folder.mkdir(parents=True)
    killed, stages, over = [], [], threading.Event()
    killer = threading.Thread(target=kill_one, args=(un, killed, over))
    killer.start()
    with Workers(2, lambda title, tick: stages.append(tick.stage)) as engine:
        made, _ = runner.run_study(STUDY, "pocket", tmp_path, plan, engine, Board(Console(quiet=True), [], 1))
    over.set()
    killer.join()
    assert killed
    assert "a process was killed, starting again" in stages
    assert [row["cells"][0]["n"] for row in made["rows"]] == [1, 1], "neither the run nor the one beside it is lost"
    assert len(set((un / "pids").read_text(encoding="utf8").split())) == 2
    straight = train(plan.todo[un], tmp_path / "straight")
    assert results.read(un)["curve"] == straight["curve"], "it went on as if nothing had happened"
    assert multiprocessing.active_children() == []


def test_a_job_that_kills_its_process_each_time_fails_alone(monkeypatch, forked_workers):
    monkeypatch.setattr(workers, "RETRIES", 1)
    with Workers(1, lambda *_: None) as engine:
        engine.submit("a", die)
        engine.submit("b", str)
        ended = dict(engine.ended())
    assert str(ended["a"]).startswith("its process, or one beside it, was killed 2 times")
    assert ended["b"] == "b"


def test_a_run_whose_process_is_killed_is_a_failed_row(tmp_path, monkeypatch, capsys, forked_workers):
    monkeypatch.setattr(workers, "RETRIES", 0)
    monkeypatch.setattr(runner, "study_job", die)
    monkeypatch.setitem(STUDIES, "one", ONE)
    assert main(["study", "one", "--only", "LN", "--out", str(tmp_path)]) == 1
    assert "failed: its process, or one beside it, was killed 1 times" in capsys.readouterr().out


def test_interrupted_run_that_fails_is_marked_failed(tmp_path):
    folder = put(expand(ONE, "pocket")[0], tmp_path, status="interrupted at step 3", scores={})
    (folder / table.FAILURE).write_text("failed: out of memory\n", encoding="utf8")
    collect = functools.partial(table.collect, ONE, "pocket", tmp_path)
    assert collect()["rows"][1]["cells"][0]["runs"][0]["status"] == "failed: out of memory"
    put(expand(ONE, "pocket")[0], tmp_path)
    assert collect()["rows"][1]["cells"][0]["runs"][0]["status"] == "done"
