"""Settings of runs: what is refused, and that they survive a file."""

import dataclasses
import math

import pytest
from normkit_papers.models.config import Model
from normkit_papers.recipes import RECIPES
from normkit_papers.train.config import DetectionRun, DigitsRun, G2PRun, ImageRun, LanguageRun, Run, TranslationRun

RUNS = {
    "g2p": G2PRun(name="a", data="cmudict", steps=9),
    "mt": TranslationRun(name="a", data="multi30k.de-en", steps=9),
    "lm": LanguageRun(name="a", data="ptb", steps=9),
    "digits": DigitsRun(name="a", data="digits", steps=9),
    "images": ImageRun(name="a", data="cifar10", steps=9),
    "detection": DetectionRun(name="a", data="coco", steps=9),
}
TINY = Model(width=8, heads=2)


@pytest.mark.parametrize("run", [*RUNS.values(), *(recipe() for recipe in RECIPES.values())], ids=lambda run: run.name)
def test_settings_survive_a_file(run):
    assert Run.from_json(run.to_json()) == run


@pytest.mark.parametrize(
    ("task", "changes"),
    [
        ("g2p", {"steps": 0}),
        ("g2p", {"lr": math.inf}),
        ("g2p", {"precision": "foo"}),
        ("g2p", {"name": "../a"}),
        ("g2p", {"average": 2}),
        ("g2p", {"average": 9, "checkpoint_every": 1}),
        ("g2p", {"patience": 1}),
        ("g2p", {"valid_bleu": True}),
        ("g2p", {"context": 5}),
        ("g2p", {"warmup": 0, "schedule": "inverse_sqrt"}),
        ("g2p", {"warmup_start": 0.1}),
        ("g2p", {"milestones": (5, 4)}),
        ("g2p", {"milestones": (4, 6), "schedule": "steps", "warmup": 4}),
        ("g2p", {"scale_loss": 0.1, "compile": True}),
        ("mt", {"weights": "runs/old"}),
        ("lm", {"bucketing": False}),
        ("lm", {"context": 2000}),
        ("lm", {"beam": 5}),
        ("digits", {"images": {}}),
        ("images", {"floor_lr": 1e-3, "body_lr": 0.0}),
        ("images", {"ema": 0.9, "average": 1, "checkpoint_every": 1}),
        ("detection", {"label_smoothing": 0.1}),
        ("detection", {"ema": 0.9}),
    ],
)
def test_settings_that_do_not_fit_are_refused_by_name(task, changes):
    (name, *_) = changes
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(RUNS[task], **changes)


@pytest.mark.parametrize(
    ("task", "model"),
    [
        ("g2p", {"mask_logits": True}),
        ("g2p", {"arch": "lstm"}),
        ("digits", {"fixnorm": True}),
        ("images", {"share": True}),
        ("mt", {"adaptive": (5,)}),
        ("detection", {"patch": 2}),
    ],
)
def test_a_task_refuses_settings_of_models_that_it_does_not_use(task, model):
    with pytest.raises(ValueError, match=f"model.{next(iter(model))}"):
        dataclasses.replace(RUNS[task], model=Model(**model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("heads", 3), ("depth", 0), ("placement", "mid"), ("width", 10**9), ("depth", 10**8), ("kernels", (3, 4)),
        ("dropout", 1.0), ("init", "big"), ("memory", 4),
    ],
)  # fmt: skip
def test_impossible_models_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(TINY, **{name: value})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"task": "g2p"}', '{"task": "zz"}', "[" * 100_000])
def test_other_files_are_no_settings(text):
    with pytest.raises(ValueError, match="settings"):
        Run.from_json(text)


def test_layers_are_not_dropped_where_processes_would_wait_for_each_other():
    dropped = Model(layer_drop=0.2, norm="batch")
    dataclasses.replace(RUNS["g2p"], model=dropped, devices=2)
    with pytest.raises(ValueError, match=r"model\.layer_drop"):
        dataclasses.replace(RUNS["g2p"], model=dataclasses.replace(dropped, norm="batch(sync=True)"), devices=2)
    with pytest.raises(ValueError, match="devices"):
        dataclasses.replace(RUNS["lm"], model=Model(attention="relative"), devices=2)
