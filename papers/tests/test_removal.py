"""`papers use remove-norms`: runs lose their norms, on their own data."""

import csv
import dataclasses
import json

import pytest
import torch
from normkit_papers.cli import main
from normkit_papers.models.config import Model
from normkit_papers.removal import COSTS, FILE, Settings, remove_norms_of_run
from normkit_papers.train.config import DigitsRun, G2PRun, LanguageRun
from normkit_papers.train.folder import load
from normkit_papers.train.run import train
from safetensors.torch import load_file

from normkit.norms import LayerNorm, StatNorm

RUN = G2PRun(
    name="g2p", data="cmudict", steps=40,
    model=Model(width=16, hidden=24, depth=1, heads=2, tie=False, max_length=64),
    batch_tokens=200, lr=3e-3, warmup=4, test_items=20, valid_items=40, record_every=0, threads=1,
)  # fmt: skip
DIGITS = DigitsRun(
    name="digits", data="digits", steps=40, batch_tokens=32, record_every=0, threads=1,
    model=Model(width=16, hidden=16, depth=1, heads=2, dropout=0.1),
)  # fmt: skip
MIXED = dataclasses.replace(
    DIGITS, model=dataclasses.replace(DIGITS.model, norm_at={"*final_norm": "nonorm", "*feedforward_norm": "rms"})
)
CARRIED = LanguageRun(  # other numbers of texts side by side in training, validation and test
    name="lm", data="pydoc", steps=2, batch_tokens=64, context=16, test_context=200, record_every=0,
    model=Model(width=8, hidden=8, depth=1, heads=2, attention="relative", memory=4), threads=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "settings", "norms"),
    [("outputs", DIGITS, 3), ("outputs", MIXED, 3), ("task", RUN, 7), ("outputs", CARRIED, 3)],
)
def test_a_run_loses_its_norms_and_the_report_compares(loss, settings, norms, tmp_path, capsys):
    train(settings, tmp_path / "run")
    words = ["use", "remove-norms", tmp_path / "run", "--steps", 4, "--loss", loss, "--out", tmp_path / "out"]
    assert main([str(word) for word in words]) == 0
    assert f"{norms} of {norms} norms fold away" in capsys.readouterr().out
    folded = load(tmp_path / "out").model
    assert not any(isinstance(module, LayerNorm | StatNorm) for module in folded.modules())
    kept = json.loads((tmp_path / "out" / FILE).read_text())
    (scores,) = [value for name, value in kept.items() if name not in ("settings", "fold", "where")]
    stages = ["original", "fitted", "without norms", *(["original, trained likewise"] if loss == "task" else [])]
    assert list(scores) == stages
    assert not (tmp_path / "out" / ".removal").exists()


def test_with_a_budget_nothing_is_trained_and_the_costs_are_kept(tmp_path):
    train(RUN, tmp_path / "run")
    words = ["use", "remove-norms", tmp_path / "run", "--budget", 0.05, "--out", tmp_path / "out"]
    assert main([str(word) for word in words]) == 0
    with (tmp_path / "out" / COSTS).open() as file:
        costs = list(csv.DictReader(file))
    assert len(costs) == 7
    assert {row["unit"] for row in costs} == {"validation loss"}
    scores = json.loads((tmp_path / "out" / FILE).read_text())["validation loss"]
    assert scores["without norms"] - scores["original"] <= 0.05 + 1e-6
    kept = sum(isinstance(module, LayerNorm) for module in load(tmp_path / "out").model.modules())
    assert kept == sum(row["gone"] == "no" for row in costs)


def test_an_interrupted_removal_resumes_to_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("normkit.removal.distill.SAVE_EVERY", 3)
    run, settings, seen = tmp_path / "run", Settings(steps=6, loss="task", lr=1e-3), []
    train(DIGITS, run)
    remove_norms_of_run(run, tmp_path / "whole", settings)

    def stop(stage, done, of, left):
        if stage == "training, step" and done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        remove_norms_of_run(run, tmp_path / "parts", settings, on_progress=stop)
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    for out, changed, resume in (("parts", {}, False), ("other", {}, True), ("parts", {"steps": 7}, True)):
        with pytest.raises(ValueError, match=r"--resume"):
            remove_norms_of_run(run, tmp_path / out, dataclasses.replace(settings, **changed), resume=resume)
    remove_norms_of_run(
        run, tmp_path / "parts", settings, resume=True, on_progress=lambda stage, done, *_: seen.append((stage, done))
    )
    assert [done for stage, done in seen if stage == "training, step"] == [4, 5, 6]
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(tensor, parts[name]) for name, tensor in whole.items())


def test_bad_input_raises(tmp_path):
    run = tmp_path / "run"
    train(DIGITS, run)
    for settings, name in ((Settings(steps=0), "steps"), (Settings(to="rms"), "to"), (Settings(lr=-1.0), "lr")):
        with pytest.raises(ValueError, match=name):
            remove_norms_of_run(run, tmp_path / "out", settings)
        assert not (tmp_path / "out" / "run.json").exists()
    with pytest.raises(ValueError, match="itself"):
        remove_norms_of_run(run, run, Settings())
