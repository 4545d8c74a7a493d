"""Studies on a local Ray: a run of a killed worker resumes on another one."""

import dataclasses
import threading

import pytest
import worker_jobs
from normkit_papers.report import results
from normkit_papers.studies import runner
from normkit_papers.studies.catalogue import RECIPES
from normkit_papers.studies.progress import Board
from normkit_papers.studies.ray_workers import RayWorkers
from normkit_papers.study import Base, Column, Row, Study
from normkit_papers.train.run import train
from rich.console import Console
from worker_jobs import kill_one, noted_job

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'normkit[ray]'")

STEPS = 30
TINY = {"steps": STEPS, "batch_tokens": 16, "model.depth": 1, "checkpoint_every": 5, "keep": 2, "warmup": 2}
STUDY = Study(
    id="toy",
    title="two norms on Ray",
    rows=(Row(label="LN", settings={}), Row(label="UN", settings={"model.norm": "un"})),
    columns=(Column(title="accuracy", metric="accuracy", base={"pocket": Base("tiny", RECIPES["vit_digits"], TINY)}),),
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_lost_workers_run_resumes_elsewhere(tmp_path, monkeypatch):
    ray.cloudpickle.register_pickle_by_value(worker_jobs)  # workers need not find this file
    monkeypatch.setattr(runner, "study_job", noted_job)
    plan = runner.plan(STUDY, "pocket", tmp_path)
    layer, un = plan.todo
    for folder in (layer, un):
        folder.mkdir(parents=True)
    killed: list[str] = []
    over = threading.Event()
    killer = threading.Thread(target=kill_one, args=(un, killed, over))
    with RayWorkers("local", cores=2) as cluster:
        gpu = dataclasses.replace(plan.todo[un], device="cuda")
        with pytest.raises(ValueError, match=r"needs 1 GPU; this Ray cluster has 0"):
            cluster.submit("on a GPU", noted_job, gpu, un, "")
        killer.start()
        table, interrupted = runner.run_study(
            STUDY, "pocket", tmp_path, plan, cluster, Board(Console(quiet=True), [], 1)
        )
    over.set()
    killer.join()
    assert killed, (un / "failed.txt").read_text(encoding="utf8") if (un / "failed.txt").is_file() else "never seen"
    assert not interrupted
    assert [row["cells"][0]["n"] for row in table["rows"]] == [1, 1]
    pids = {folder: (folder / "pids").read_text(encoding="utf8").split() for folder in (layer, un)}
    assert [len(set(pids[folder])) for folder in (layer, un)] == [1, 2], "two workers did the run of the one killed"
    assert pids[layer][0] != pids[un][0], "runs were side by side"
    straight = train(plan.todo[un], tmp_path / "straight")
    assert results.read(un)["curve"] == straight["curve"], "it went on as if nothing had happened"


def test_an_address_without_a_ray_cluster_is_an_error():
    with pytest.raises(ValueError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        RayWorkers("127.0.0.1:1")
