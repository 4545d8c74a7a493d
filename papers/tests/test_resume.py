"""A run killed at any step and resumed is bit for bit the run that was never killed."""

import dataclasses
import errno
import json
import math
import os
import signal
import time

import pytest
import torch
from forked import Program
from normkit_papers.models.config import Model
from normkit_papers.train import callback
from normkit_papers.train.config import DigitsRun, G2PRun
from normkit_papers.train.folder import checkpoints
from normkit_papers.train.run import train
from normkit_papers.train.weights import model_state, read_checkpoint

RUN = DigitsRun(
    name="resumed", data="digits", steps=40, batch_tokens=24, warmup=5, valid_every=8, checkpoint_every=7,
    record_every=3, threads=1,
    model=Model(width=16, hidden=24, depth=2, heads=2, norm="un(warmup=9)", dropout=0.2, attention_dropout=0.1),
)  # fmt: skip


class Killed(Exception):
    """Stands for whatever ends a process."""


def checkpoint_path(folder, step):
    """Where the checkpoint of a step lies."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def everything(folder):
    """All that a run leaves, but for times."""
    result = json.loads((folder / "result.json").read_text())
    kept = {name: result[name] for name in ("run", "status", "parameters", "curve", "valid", "scores")}
    names = ("model.safetensors", "rows.csv", "run.json", "vocab.json")
    files = {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}
    last = read_checkpoint(checkpoints(folder)[-1])
    return kept, files, last["optimizer_states"], last["lr_schedulers"], last["global_step"]


def same(a, b):
    """Assert that two nested values are alike to the last bit."""
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for mine, theirs in zip(a, b, strict=True):
            same(mine, theirs)
    elif isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    else:
        assert a == b


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    train(RUN, folder)
    return folder


def killed_at(run, folder, *steps):
    """Train a run that is killed at these steps, and then resumed to its end."""
    for step in steps:

        def die(progress, step=step):
            if progress.step >= step:
                raise Killed

        with pytest.raises(Killed):
            train(run, folder, resume=True, on_progress=die)
        assert not (folder / "result.json").exists()
    train(run, folder, resume=True)
    return everything(folder)


@pytest.mark.parametrize("step", [3, 7, 8, 20, 35, 40])
def test_killed_at_a_step_and_resumed(step, whole, tmp_path):
    same(killed_at(RUN, tmp_path, step), everything(whole))


def test_killed_twice_with_accumulation(tmp_path):
    model = dataclasses.replace(RUN.model, norm="power(groups=0, warmup=7)")
    run = dataclasses.replace(RUN, accumulate=2, steps=20, model=model)
    train(run, tmp_path / "whole")
    same(killed_at(run, tmp_path / "killed", 9, 16), everything(tmp_path / "whole"))


def test_asked_to_stop_between_two_points_of_the_curve_and_two_checkpoints(tmp_path, monkeypatch):
    """The checkpoint of the interrupt is resumed from, and not averaged."""
    monkeypatch.setattr(callback, "REPORT_EVERY", 0.0)
    run = dataclasses.replace(RUN, steps=400, valid_every=200, checkpoint_every=100, record_every=100, average=3)
    train(run, tmp_path / "whole")
    result = train(run, tmp_path / "stopped", on_progress=lambda progress: progress.step >= 317)
    assert result["status"] == "interrupted at step 317"
    assert checkpoints(tmp_path / "stopped")[-1].name == "step-00000317.ckpt"
    shown = []
    assert train(run, tmp_path / "stopped", resume=True, on_progress=shown.append)["averaged"] == 3
    same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))
    assert not any(math.isnan(progress.loss) for progress in shown if progress.stage == "training")


def test_a_run_resumes_with_another_name_and_workers(whole, tmp_path):
    train(RUN, tmp_path, on_progress=lambda progress: progress.step >= 17)
    moved = dataclasses.replace(RUN, name="moved", device="auto", threads=None)
    assert train(moved, tmp_path, resume=True)["run"]["name"] == "moved"
    assert (tmp_path / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"batch_tokens \(24, not 12\), milestones"):
        train(dataclasses.replace(moved, batch_tokens=12, milestones=(30,)), tmp_path, resume=True)


def test_a_process_that_is_killed(whole, tmp_path):
    """SIGKILL while it trains; what resumes is another process."""
    code = (
        "import sys, time; from normkit_papers.train.config import Run; from normkit_papers.train.run import train\n"
        "train(Run.from_json(sys.argv[2]), sys.argv[1], resume=True, on_progress=lambda p: time.sleep(0.05))\n"
    )
    folder = tmp_path / "run"
    program = Program(code, str(folder), RUN.to_json())
    deadline = time.monotonic() + 300
    while not checkpoint_path(folder, 14).exists():
        assert program.process.is_alive(), "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    program.process.kill()
    assert program.ended()[0] == -signal.SIGKILL
    assert not (folder / "result.json").exists()
    code, _, errors = Program(code, str(folder), RUN.to_json()).ended()
    assert code == 0, errors
    same(everything(folder), everything(whole))


def test_a_run_that_has_ended_is_not_trained_again(tmp_path):
    """A study deletes its checkpoints, perhaps while another process is about to resume it."""
    short = dataclasses.replace(RUN, steps=3)
    result = train(short, tmp_path)
    before, seen = (tmp_path / "model.safetensors").stat(), []
    assert train(short, tmp_path, resume=True, on_progress=seen.append) == json.loads(json.dumps(result))
    assert (tmp_path / "model.safetensors").stat() == before
    assert not seen


def test_killed_between_the_last_rows_and_the_result(tmp_path, monkeypatch):
    run = G2PRun(name="rows", data="cmudict", model=RUN.model, steps=2, batch_tokens=100, checkpoint_every=1,
                 valid_items=2, test_items=2, threads=1)  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr("normkit_papers.results.write", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            train(run, tmp_path)
    before = (tmp_path / "rows.csv").read_text()
    assert "singular_value[0]" in before
    train(run, tmp_path, resume=True)
    assert (tmp_path / "rows.csv").read_text() == before


def test_a_run_that_ended_early_trains_no_further(tmp_path):
    still = dataclasses.replace(RUN.model, norm="layer")  # running statistics would change at any rate
    run = dataclasses.replace(RUN, checkpoint_every=8, patience=1, lr=1e-12, schedule="constant", model=still)
    train(run, tmp_path / "whole")
    stopped = train(run, tmp_path / "stopped", on_progress=lambda progress: progress.stage == "scoring")
    assert stopped["status"] == "interrupted at step 16"
    assert train(run, tmp_path / "stopped", resume=True)["curve"][-1]["step"] == 16
    same(everything(tmp_path / "stopped"), everything(tmp_path / "whole"))


# -- what cannot be resumed ------------------------------------------------------------------------------------------


def test_a_checkpoint_cut_short_is_refused(tmp_path):
    with pytest.raises(Killed):
        train(RUN, tmp_path, on_progress=lambda progress: (_ for _ in ()).throw(Killed) if progress.step > 14 else None)
    path = checkpoints(tmp_path)[-1]
    whole = path.read_bytes()
    for length in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"step-00000014\.ckpt is cut short or not a checkpoint of a run"):
            train(RUN, tmp_path, resume=True)
    path.unlink()
    assert train(RUN, tmp_path, resume=True)["status"] == "done", "the one before it serves"


def test_full_disk_keeps_the_previous_checkpoint(whole, tmp_path, monkeypatch):
    free = [9]  # files that still fit

    def full(descriptor):
        free[0] -= 1
        if free[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left on device"):
            train(RUN, tmp_path)
    kept = checkpoints(tmp_path)
    assert kept, "some were written before the disk was full"
    assert model_state(read_checkpoint(kept[-1]))
    assert [path for path in (tmp_path / "checkpoints").iterdir() if path not in kept] == [], "no half file"
    train(RUN, tmp_path, resume=True)
    same(everything(tmp_path), everything(whole))
