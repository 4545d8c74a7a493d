"""Run folders: the lock, damaged files, interrupts by signals, several seeds."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from forked import Program
from normkit_papers.cli import main
from normkit_papers.models.config import Model
from normkit_papers.report import results
from normkit_papers.train import environment
from normkit_papers.train import run as run_module
from normkit_papers.train.checkpoints import checkpoint_path, checkpoints, remove_temporary
from normkit_papers.train.config import Run
from normkit_papers.train.folder import LOCK, load, locked
from normkit_papers.train.run import train
from normkit_papers.train.task import Task

from normkit._util import write_whole
from normkit.bench import use_threads

RUN = Run(
    name="folder", task="digits", data="digits", model=Model(width=8, hidden=8, depth=1, heads=1), steps=6,
    batch_tokens=16, checkpoint_every=3, record_every=0, threads=1,
)  # fmt: skip
WORDS = dataclasses.replace(
    RUN, task="g2p", data="cmudict", steps=2, batch_tokens=200, valid_items=4, test_items=4, checkpoint_every=0
)
FLAGS = [
    "--model.width", "8", "--model.hidden", "8", "--model.depth", "1", "--model.heads", "1", "--batch-tokens", "16",
]  # fmt: skip
SHORT = ["train", "vit_digits", *FLAGS, "--steps", "4", "--warmup", "1", "--valid-every", "0", "--record-every", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    train(RUN, folder)
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    for name in ("run.json", "vocab.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


def test_the_last_validation_runs_on_the_device_of_the_scores(tmp_path, monkeypatch):
    order, move, validate = [], Task.to, Task.validate
    monkeypatch.setattr(Task, "to", lambda task, device: order.append(device) or move(task, device))
    monkeypatch.setattr(Task, "validate", lambda task: order.append("validate") or validate(task))
    train(dataclasses.replace(WORDS, steps=1), tmp_path)
    assert order[-2:] == ["cpu", "validate"], "Lightning leaves the model on the CPU"


def test_auto_is_no_gpu_of_apple(tmp_path, monkeypatch):
    """They lack float64."""
    from lightning.pytorch.trainer.connectors.accelerator_connector import MPSAccelerator

    monkeypatch.setattr(MPSAccelerator, "is_available", staticmethod(lambda: True))
    monkeypatch.setattr("lightning.fabric.accelerators.mps.MPSAccelerator.is_available", staticmethod(lambda: True))
    assert train(RUN, tmp_path)["status"] == "done"


def test_changes_that_git_does_not_list_in_time_are_unknown(monkeypatch):
    monkeypatch.setattr(environment, "_git", lambda folder, name, *_: None if name == "status" else name)
    assert environment.environment("cpu")["dirty"] is None


def test_a_run_leaves_the_threads_of_its_process_as_they_were(tmp_path):
    with use_threads(2):
        assert train(RUN, tmp_path)["where"]["threads"] == 1
        assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("name", "value", "allowed"), [("decay", -0.1, "above 0"), ("weight_decay", -0.1, "at least 0")]
)
def test_factors_that_would_climb_are_errors(name, value, allowed):
    with pytest.raises(ValueError, match=f"^{name} must be {allowed}; got -0.1"):
        dataclasses.replace(RUN, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "lm", "data": "pydoc", "batch_tokens": 10**8}, "words to train on; needs 100000064"),
        ({"precision": "16-mixed", "device": "cpu"}, "precision=16-mixed needs a GPU; give --precision bf16-mixed"),
    ],
)
def test_a_run_that_fails_before_its_first_step_replaces_nothing(changes, message, copy):
    before = {path: path.read_bytes() for path in copy.iterdir()}
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(RUN, **changes), copy)
    assert {path: path.read_bytes() for path in copy.iterdir()} == before


# -- the lock --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resume", [False, True])
def test_training_again_leaves_nothing_that_was_made_of_earlier_weights(resume, copy):
    stale = ("folded/run.json", "unfolded/model.safetensors", "removal.json", "table.txt", "report.html", "curves.svg")
    for name in stale:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).touch()
    (copy / "folded" / "notes.txt").touch()
    train(RUN, copy, resume)
    assert not [name for name in stale if (copy / name).exists()]
    assert not (copy / "unfolded").exists()
    assert (copy / "folded" / "notes.txt").exists(), "the user's own file"


def test_only_one_process_writes_a_folder(tmp_path):
    code = (
        "import pathlib, sys, time\n"
        "from normkit_papers.train.folder import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(ValueError, match=rf"being written by process {process.pid} on \S+; wait for its end"):
            train(RUN, tmp_path)
        process.kill()
        process.wait()
    assert (tmp_path / LOCK).exists(), "a killed process leaves the file"
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} "), "not the one that was killed"
    assert not (tmp_path / LOCK).exists()


def test_a_lock_leaves_no_empty_folder(tmp_path):
    with locked(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()


def test_a_lock_that_another_process_removes_meanwhile_is_made_again(tmp_path, monkeypatch):
    exists = Path.exists

    def removed_after(path):
        found = exists(path)
        if path.name == LOCK:
            path.unlink(missing_ok=True)
        return found

    monkeypatch.setattr(Path, "exists", removed_after)
    with locked(tmp_path):
        pass


# -- damaged files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.json", "{}", r"a model of task digits needs a vocabulary 'classes'; got \[\]"),
        ("vocab.json", '{"classes": {"symbols": ["a"], "merges": [["a", "z"]], "punctuation": false}}', r"lacks"),
        ("vocab.json", "[1]", r"vocab\.json cannot be read: it must be a JSON object"),
        ("vocab.json", "[" * 100_000, r"vocab\.json cannot be read: "),
        ("run.json", "[" * 100_000, r"run\.json: not the settings of a run of this version: "),
        ("run.json", "[]", r"settings must be a JSON object; got \[\]; copy it from the folder "),
        ("run.json", "", r"run\.json: not the settings of a run of .*; copy it from the folder in which"),
        ("run.json", {"steps": "12"}, r"steps must be a whole number; got '12'"),
        ("run.json", {"color": 1}, r"unknown settings: 'color'"),
        ("run.json", {"task": "lm"}, r"a model of task lm needs a vocabulary 'words'; got \['classes'\]"),
        ("run.json", {"model": {"width": 10**9}}, r"width must be at least 1 and at most \d+; got 1000000000"),
        ("run.json", {"model": {"depth": 10**8}}, r"depth must be at least 1 and at most 10000; got 100000000"),
        ("run.json", {"model": {"max_length": 10**10}}, r"max_length must be at least 1 and at most"),
        (
            "run.json",
            {"model": {"norm": "un(window=999999999999)"}},
            r"window must be a whole number from 1 to 65536",
        ),
    ],
)
def test_damaged_files_are_refused_in_one_sentence(name, content, message, copy):
    if isinstance(content, dict):
        settings = json.loads((copy / name).read_text())
        for key, value in content.items():
            settings[key] = {**settings[key], **value} if isinstance(value, dict) else value
        content = json.dumps(settings)
    (copy / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        load(copy)


def test_missing_vocabularies_are_named_with_what_to_do(copy):
    (copy / "vocab.json").unlink()
    with pytest.raises(ValueError, match=r"vocab\.json is missing; copy it from the folder in which the run"):
        load(copy)


@pytest.mark.parametrize(
    "name", ["checkpoints/epoch=3.ckpt", "model.safetensors", "model-00001-of-00002.safetensors", "vocab.json"]
)
def test_files_of_other_models_are_not_replaced(name, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / name).write_text("mine")
    for resume in (False, True):
        with pytest.raises(ValueError, match=f"holds files of something else than a run .{name}.; name another folder"):
            train(RUN, tmp_path, resume=resume)
    assert [path.read_text() for path in tmp_path.rglob("*") if path.is_file()] == ["mine"]


def test_a_number_that_no_tensor_holds_is_refused_with_the_limit():
    with pytest.raises(
        ValueError, match=r"steps must be a whole number between -2\*\*62 and 2\*\*62; got 100000000000000000000"
    ):
        dataclasses.replace(RUN, steps=10**20)


def test_integers_are_refused_in_place_of_weights(copy):
    state = safetensors.torch.load_file(copy / "model.safetensors")
    state["head.weight"] = state["head.weight"].to(torch.int64)
    safetensors.torch.save_file(state, copy / "model.safetensors")
    with pytest.raises(ValueError, match=r"head\.weight of type torch\.int64 in place of torch\.float32"):
        load(copy)


def test_settings_of_an_older_version_get_defaults(copy):
    settings = json.loads((copy / "run.json").read_text())
    del settings["images"], settings["momentum"], settings["model"]["rank"]
    (copy / "run.json").write_text(json.dumps(settings))
    assert load(copy).run == RUN


def test_unfinished_checkpoints_are_removed(tmp_path):
    with pytest.raises(InterruptedError):
        train(RUN, tmp_path, on_progress=_raise_after_step_4)
    left = checkpoint_path(tmp_path, 6).with_name(".step-00000006.ckpt.1")
    left.write_bytes(b"half")
    train(RUN, tmp_path, resume=True)
    assert not left.exists()
    assert checkpoints(tmp_path)[-1] == checkpoint_path(tmp_path, 6)
    own = left.with_name(f".step-00000009.ckpt.{os.getpid()}")
    own.write_bytes(b"half")
    remove_temporary(tmp_path)
    assert own.exists()


def _raise_after_step_4(progress):
    if progress.step >= 4:
        raise InterruptedError


def test_processes_of_one_number_write_a_file_whole(tmp_path, monkeypatch):
    """As those of two containers that share a folder."""
    sync = os.fsync

    def write_in_between(descriptor):
        monkeypatch.setattr(os, "fsync", sync)
        write_whole(tmp_path / "note", b"other")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", write_in_between)
    write_whole(tmp_path / "note", b"first")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("note", b"first")]


# -- progress, seeds, signals ----------------------------------------------------------------------------------------


def test_there_is_no_estimate_before_speed_is_measured(tmp_path):
    seen = []
    train(dataclasses.replace(RUN, steps=3), tmp_path, on_progress=seen.append)
    first, second, *_ = [progress for progress in seen if progress.stage == "training"]
    assert (first.seconds_left, first.tokens_per_s) == (None, 0.0)
    assert second.seconds_left > 0
    assert second.tokens_per_s > 0


def test_several_seeds_train_into_separate_folders(tmp_path, capsys):
    (tmp_path / "statistics.svg").touch()  # of an earlier report
    assert main([*SHORT, "--seeds", "2", "--out", str(tmp_path)]) == 0
    found = results.find([tmp_path])
    assert sorted(path.name for path in found) == ["seed-0", "seed-1"]
    assert [found[tmp_path / f"seed-{n}"]["run"]["seed"] for n in (0, 1)] == [0, 1]
    assert (tmp_path / "report.html").exists()
    assert not (tmp_path / "statistics.svg").exists(), "these runs recorded none"
    before = (tmp_path / "seed-0" / "result.json").stat().st_mtime_ns
    assert main([*SHORT, "--seeds", "3", "--resume", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "seed-0" / "result.json").stat().st_mtime_ns == before, "a finished seed is not repeated"
    assert len(results.find([tmp_path])) == 3
    assert main([*SHORT, "--seeds", "0", "--out", str(tmp_path)]) == 2
    assert "seeds must be at least 1 and at most 1,000; got 0" in capsys.readouterr().err


@pytest.mark.skipif(signal.getsignal(signal.SIGINT) is signal.SIG_IGN, reason="background processes ignore Ctrl-C")
@pytest.mark.parametrize(
    ("signals", "status"),
    [([signal.SIGTERM], 143), ([signal.SIGINT], 130), ([signal.SIGINT, signal.SIGINT], 130)],
)
def test_a_signal_ends_training_with_its_status(signals, status, tmp_path):
    command = [*SHORT, "--steps", "20000", "--checkpoint-every", "20000", "--out", str(tmp_path)]
    program = Program("import sys; from normkit_papers.cli import main; sys.exit(main())", *command)
    while "step 1 of" not in program.printed():
        time.sleep(0.1)
    for number in signals:
        os.kill(program.process.pid, number)
        time.sleep(0.01)
    code, out, err = program.ended(240)
    assert code == status, (out, err)
    assert "Traceback" not in err
    if len(signals) == 1:
        result = results.read(tmp_path)
        assert result["status"].startswith("interrupted at step ")
        assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, int(result["status"].split()[-1]))]
    else:
        assert err == "normkit: interrupted\n"


def test_a_signal_while_data_is_read_ends_with_its_status(tmp_path, monkeypatch, capsys):
    def source(run, on_stage):
        signal.raise_signal(signal.SIGTERM)
        return lambda: on_stage("reading")

    monkeypatch.setattr(run_module, "source", source)
    assert main([*SHORT, "--out", str(tmp_path / "run")]) == 143
    assert capsys.readouterr().err == "normkit: interrupted; the same command with --resume continues\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("count", "end"), [(6, "c, d, e, f"), (9, "e, f, 3 more")])
def test_the_error_for_a_folder_of_runs_hides_none(tmp_path, monkeypatch, count, end):
    monkeypatch.chdir(tmp_path)
    for name in "abcdefghi"[:count]:
        Path(name).mkdir()
        (Path(name) / "run.json").touch()
    with pytest.raises(ValueError, match=f"runs in it are a, .*{end}$"):
        load(".")


# -- attention on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("run", "allowed"), [(WORDS, False), (dataclasses.replace(WORDS, static=True), True), (RUN, True)]
)
def test_batches_of_many_shapes_do_without_the_attention_that_plans_for_each(run, allowed, tmp_path):
    seen = {}
    before = torch.backends.cuda.cudnn_sdp_enabled()
    train(run, tmp_path, on_progress=lambda p: seen.update({p.stage: torch.backends.cuda.cudnn_sdp_enabled()}))
    assert before is torch.backends.cuda.cudnn_sdp_enabled() is True
    assert seen["training"] == allowed
    assert seen.get("scoring", allowed) == allowed
