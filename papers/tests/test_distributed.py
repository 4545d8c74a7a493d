"""Several processes and hosts: the writing rank, refusals, equal results."""

import dataclasses
import json
import os

import pytest
from forked import Program, free_port
from normkit_papers.recipes import RECIPES
from normkit_papers.train.lightning import make_trainer
from normkit_papers.train.parallel import cluster_plugins, is_rank_zero
from normkit_papers.train.run import train

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0", "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2"}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1",
         "SLURM_NNODES": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
         "SLURM_NODELIST": "127.0.0.1"}  # fmt: skip
LAUNCHERS = ("TORCHELASTIC", "SLURM", "RANK", "LOCAL_", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_")
TINY = {"steps": 6, "batch_tokens": 16, "model.depth": 1, "model.norm": "un(sync=True, warmup=4)", "device": "cpu",
        "valid_every": 3, "checkpoint_every": 3, "record_every": 2, "threads": 1}  # fmt: skip


@pytest.fixture(autouse=True)
def _started_by_nobody(monkeypatch):
    for name in [name for name in os.environ if name.startswith(LAUNCHERS)]:
        monkeypatch.delenv(name)


def test_no_training_leaves_its_checkpoints_to_slurm(monkeypatch):
    for name, value in {**SLURM, "SLURM_NTASKS": "1", "SLURM_NNODES": "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = make_trainer(None, cluster_plugins(), max_steps=1, accelerator="cpu")
    assert not trainer._accelerator_connector.cluster_environment.auto_requeue


def tiny(**changed):
    changed = {**{name: value for name, value in TINY.items() if "." not in name}, **changed}
    run = RECIPES["vit_digits"]()
    model = dataclasses.replace(run.model, depth=TINY["model.depth"], norm=TINY["model.norm"])
    return dataclasses.replace(run, model=model, **changed)


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        (TORCHRUN, True),
        ({**TORCHRUN, "SLURM_PROCID": "1"}, True),  # torchrun by srun on each host: torchrun counts
        ({**TORCHRUN, "RANK": "2", "GROUP_RANK": "1"}, False),
        (SLURM, True),
        ({**SLURM, "SLURM_PROCID": "1"}, False),
        ({"NODE_RANK": "1"}, False),  # Lightning on the second host; its first process there has no LOCAL_RANK
        ({"NODE_RANK": "0", "LOCAL_RANK": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_JOB_NAME": "bash", "LOCAL_RANK": "1"}, False),  # Lightning's, in a shell of SLURM
    ],
)
def test_one_process_is_the_first(variables, is_first, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank_zero() == is_first


def test_a_run_on_one_device_is_not_one_of_several(monkeypatch, tmp_path):
    monkeypatch.setenv("NODE_RANK", "1")
    with pytest.raises(ValueError, match="--devices"):
        train(tiny(), tmp_path / "run")
    monkeypatch.delenv("NODE_RANK")
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--devices"):
        train(tiny(devices=2), tmp_path / "run")
    assert not (tmp_path / "run").exists(), "else it would train, print nothing and write nothing"


def start(run, folder, variables, *more):
    """A program that trains into `folder`."""
    script = (
        "import sys; from normkit_papers.train.config import Run; from normkit_papers.train.run import train\n"
        f"train(Run.from_json({run.to_json()!r}), {str(folder)!r}, resume='resume' in sys.argv)\n"
        "print('this one wrote')\n"
    )
    return Program(script, *more, **variables)


def ended(programs):
    return [program.ended() for program in programs]


def hosts(launcher):
    """Environment variables of two hosts of one process each."""
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if launcher == "slurm":
        return [{**SLURM, **master, "SLURM_PROCID": host, "SLURM_NODEID": host} for host in "01"]
    return [{**master, "NODE_RANK": host} for host in "01"]


@pytest.mark.slow
def test_hosts_train_one_model_and_the_first_writes(tmp_path):
    """Two hosts that see one folder.

    With separate folders, a host that lacks the checkpoint cannot resume.
    """
    run, curves = tiny(nodes=2), []
    for launcher in ("lightning", "slurm"):
        folder = tmp_path / launcher
        outcomes = ended([start(run, folder, variables) for variables in hosts(launcher)])
        assert [code for code, _, _ in outcomes] == [0, 0], outcomes
        assert [outputs.split() for _, outputs, _ in outcomes] == [["this", "one", "wrote"], []]
        result = json.loads((folder / "result.json").read_text())
        assert result["status"] == "done"
        curves.append((result["curve"], result["scores"]["running"]))
    assert curves[0] == curves[1]

    folders = [tmp_path / "slurm", tmp_path / "elsewhere"]
    (folders[0] / "checkpoints" / "step-00000006.ckpt").unlink()
    outcomes = ended([start(run, *each, "resume") for each in zip(folders, hosts("lightning"), strict=True)])
    for code, _, error in outcomes:
        assert code == 1
        assert "would resume from different steps, [3, 0]" in error
