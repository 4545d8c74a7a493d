"""Runs of every embedded recipe, their folders, refusals, and the contents of results."""

import dataclasses
import errno
import json
import math
import os
import time
from types import SimpleNamespace

import pytest
import torch
from normkit_papers.data.corpora import CORPORA
from normkit_papers.data.embedded import SOURCES
from normkit_papers.data.images import IMAGE_SETS
from normkit_papers.data.scenes import SCENE_SETS
from normkit_papers.models.config import Model
from normkit_papers.report import results
from normkit_papers.studies.catalogue import RECIPES
from normkit_papers.tasks import TASKS, takers
from normkit_papers.train import callbacks
from normkit_papers.train.build import build_model
from normkit_papers.train.checkpoints import checkpoint_path, checkpoints, model_state, read_checkpoint
from normkit_papers.train.config import Run
from normkit_papers.train.environment import environment
from normkit_papers.train.fold_run import audit_run, fold_run
from normkit_papers.train.folder import load, save
from normkit_papers.train.run import train
from normkit_papers.train.translation import Translation
from normkit_papers.train.weights import load_weights, mean_weights, save_weights
from torch import nn

import normkit
from normkit._util import pick

EMBEDDED = [name for name, recipe in RECIPES.items() if recipe().data in SOURCES]
TINY = Model(width=16, hidden=24, depth=1, heads=2)
SMALL = Run(
    name="small", task="g2p", data="cmudict", model=TINY, steps=12, batch_tokens=200, warmup=3, test_items=20, threads=1
)


@pytest.fixture(scope="module", autouse=True)
def sources_once():
    """Read each source once for all tests: that is most of their time."""
    patch = pytest.MonkeyPatch()
    for name, make in list(SOURCES.items()):
        made = []
        patch.setitem(SOURCES, name, lambda make=make, made=made: made[0] if made else made.append(make()) or made[0])
    yield
    patch.undo()


@pytest.mark.parametrize("norm", ["layer", "un(warmup=4)"])
@pytest.mark.parametrize("name", EMBEDDED)
def test_a_tiny_run_of_every_recipe(name, norm, tmp_path):
    recipe = RECIPES[name]()
    model = dataclasses.replace(recipe.model, width=16, hidden=24, depth=1, heads=2, norm=norm)
    run = dataclasses.replace(
        recipe, model=model, steps=24, warmup=3, lr=1e-2, valid_every=12, checkpoint_every=12, record_every=8,
        threads=1, **({"test_items": 20} if recipe.task in takers()["test_items"] else {}),
    )  # fmt: skip
    ticks = []
    result = train(run, tmp_path, on_progress=ticks.append, command="as typed")

    assert results.read(tmp_path) == json.loads(json.dumps(result)), "the file holds what was returned"
    assert result["status"] == "done"
    assert result["command"] == "as typed"
    assert [point["step"] for point in result["valid"]] == [12, 24]
    losses = [point["train_loss"] for point in result["curve"]]
    assert len(losses) == 24
    assert sum(losses[-4:]) < sum(losses[:4])
    assert [ticks[0].step, ticks[0].stage] == [1, "training"]
    assert all(math.isfinite(figure) for score in result["scores"].values() for figure in score.values())
    assert set(result["scores"]) >= ({"running", "calibrated"} if norm != "layer" else {"running"})
    assert ("donors" in result["scores"]) == (run.task == "g2p" and norm != "layer")
    assert result["speed"]["train_words_per_s"] > 0
    rows = (tmp_path / "rows.csv").read_text().splitlines()
    assert rows[0] == "step,site,norm,quantity,value"
    sites = sum(isinstance(module, normkit.Norm) for module in load(tmp_path).model.modules())
    assert sum(",rms," in row for row in rows) == 3 * sites, "steps 1, 9 and 17, every norm"
    assert sum("gradient_norm" in row for row in rows) == 3

    again, model, vocabularies = load(tmp_path)
    assert again == run
    assert not model.training
    trained = model_state(read_checkpoint(checkpoints(tmp_path)[-1]))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, trained[key], rtol=0, atol=0)
    assert {name: vocab.symbols for name, vocab in vocabularies.items()} == {
        name: vocab.symbols for name, vocab in SOURCES[run.data]().vocabularies.items()
    }


def test_tables_have_the_same_rows():
    for task in TASKS.values():
        assert all(callable(task.load(part)) for part in ("module", "model", "example", "data"))
    assert {recipe().task for recipe in RECIPES.values()} == set(TASKS)
    assert {recipe().data for recipe in RECIPES.values()} >= set(SOURCES)
    assert all(recipe().data in {**SOURCES, **CORPORA, **IMAGE_SETS, **SCENE_SETS} for recipe in RECIPES.values())
    assert all(recipe().name == name for name, recipe in RECIPES.items())


def test_scoring_leaves_the_model_as_it_is():
    torch.manual_seed(0)
    run = dataclasses.replace(SMALL, model=dataclasses.replace(TINY, norm="batch"))
    data = SOURCES["cmudict"]()
    task = Translation(run, build_model("g2p", run.model, data.vocabularies), data)
    for norm in task.model.modules():
        if isinstance(norm, normkit.BatchNorm):
            norm.running.uniform_(0.5, 2)
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    scores = task.score(lambda stage: None)
    assert set(scores) == {"running", "donors", "calibrated", "beam"}
    assert scores["running"]["loss"] != scores["donors"]["loss"] != scores["calibrated"]["loss"]
    for name, tensor in task.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_scores_of_donors_have_the_statistics_of_a_training_batch():
    """With the test items as donors in one batch, these are the batch's own."""
    torch.manual_seed(0)
    run = dataclasses.replace(SMALL, model=dataclasses.replace(TINY, norm="batch"), batch_tokens=1000, bucketing=False)
    data = SOURCES["cmudict"]()
    task = Translation(run, build_model("g2p", run.model, data.vocabularies), data)
    task._train = task._test
    found = task.score_donors("donors")
    source, given, target = task._test.batch(list(range(20))).tensors
    task.model.train()  # batch normalization in training mode: this batch's statistics, no dropout here
    logits = task.model(source, given)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-4)


def test_loss_that_is_not_finite_ends_the_run_with_a_row(tmp_path):
    run = dataclasses.replace(SMALL, steps=40, lr=1e30, warmup=0, clip=0.0, schedule="constant")
    result = train(run, tmp_path)
    assert result["status"].startswith("diverged at step ")
    step = int(result["status"].split()[-1])
    assert 1 < step <= 4
    assert all(math.isfinite(point["train_loss"]) for point in result["curve"])
    assert result["scores"] == {}
    assert results.read(tmp_path)["status"] == result["status"]


def test_compilation_is_no_part_of_the_training_time(tmp_path, monkeypatch):
    order, clock = [], SimpleNamespace(perf_counter=lambda: order.append("clock") or time.perf_counter())
    monkeypatch.setattr(callbacks, "time", clock)
    monkeypatch.setattr(callbacks, "is_loaded", lambda: order.append("kernels"))
    train(dataclasses.replace(SMALL, steps=2, model=dataclasses.replace(TINY, norm="un")), tmp_path)
    assert order[:2] == ["kernels", "clock"]


def test_accumulation_takes_several_batches_to_a_step(tmp_path):
    result = train(
        dataclasses.replace(SMALL, accumulate=3, steps=4, model=dataclasses.replace(TINY, norm="un")), tmp_path
    )
    assert [point["step"] for point in result["curve"]] == [1, 2, 3, 4]
    norm = load(tmp_path).model.encoder.final_norm
    assert int(norm.step) == 12, "statistics move with every batch"


def test_learning_rate_of_the_curve_is_that_of_its_step(tmp_path):
    result = train(dataclasses.replace(SMALL, lr=1e-3, schedule="inverse_sqrt", warmup=4, steps=9), tmp_path)
    rates = [point["lr"] for point in result["curve"]]
    assert rates == pytest.approx([1e-3 * 2 * min(n**-0.5, n * 4**-1.5) for n in range(1, 10)])


def test_validation_decay_lowers_the_rate_at_stagnation(tmp_path, monkeypatch):
    monkeypatch.setattr(Translation, "validate", lambda task: {"loss": 1.0})
    run = dataclasses.replace(SMALL, schedule="validation_decay", lr=1e-3, warmup=0, valid_every=2, steps=10)
    rates = [point["lr"] for point in train(run, tmp_path)["curve"]]
    assert rates == pytest.approx([1e-3] * 8 + [0.8e-3] * 2), "best at 2, no better at 4, 6 and 8"


def test_average_of_the_last_checkpoints(tmp_path):
    run = dataclasses.replace(SMALL, model=dataclasses.replace(TINY, norm="un"), checkpoint_every=3, average=3)
    train(run, tmp_path)
    paths = [checkpoint_path(tmp_path, step) for step in (6, 9, 12)]
    states = [model_state(read_checkpoint(path)) for path in paths]
    for name, value in (model := load(tmp_path).model).state_dict().items():
        mean = sum(state[name].double() for state in states) / 3
        expected = states[-1][name] if not value.is_floating_point() else mean
        torch.testing.assert_close(value.double(), expected.double(), rtol=1e-6, atol=1e-7)
    assert int(model.encoder.final_norm.step) == 12
    assert results.read(tmp_path)["averaged"] == 3


def test_run_without_checkpoints_to_average_keeps_last_weights(tmp_path):
    plain = train(dataclasses.replace(SMALL, checkpoint_every=40), tmp_path / "plain")
    result = train(dataclasses.replace(SMALL, checkpoint_every=40, average=2), tmp_path / "average")
    assert result["averaged"] == 0
    assert result["scores"] == plain["scores"]
    weights = [load(tmp_path / name).model.state_dict() for name in ("plain", "average")]
    torch.testing.assert_close(*weights, rtol=0, atol=0)


def test_only_the_last_checkpoints_are_kept(tmp_path):
    train(dataclasses.replace(SMALL, checkpoint_every=2, keep=2), tmp_path)
    assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, 10), checkpoint_path(tmp_path, 12)]


def test_a_new_run_clears_what_an_old_one_left(tmp_path):
    train(dataclasses.replace(SMALL, checkpoint_every=4), tmp_path)
    train(dataclasses.replace(SMALL, steps=5), tmp_path)
    assert checkpoints(tmp_path) == []
    assert results.read(tmp_path)["run"]["steps"] == 5


def test_new_run_removes_files_of_the_run_before(tmp_path):
    train(dataclasses.replace(SMALL, checkpoint_every=4), tmp_path)
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "beam.txt").write_text("output of the run before\n")
    (tmp_path / "mine.txt").write_text("another user's")

    def die(progress):
        if progress.stage == "training":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        train(dataclasses.replace(SMALL, seed=1), tmp_path, on_progress=die)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "mine.txt", "progress.json", "rows.csv", "run.json", "vocab.json"
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"model\.safetensors is missing; the run may not have ended yet"):
        load(tmp_path)


@pytest.mark.parametrize("wrong", ["device", "data", "norm", "interrupted"])
def test_run_that_cannot_start_changes_no_file(wrong, tmp_path, monkeypatch):
    there = tmp_path / "run"
    train(dataclasses.replace(SMALL, checkpoint_every=4), there)
    before = {path: path.read_bytes() for path in there.rglob("*") if path.is_file()}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    misaligned = tmp_path / "data"
    misaligned.mkdir()
    for split in ("train", "valid", "test"):
        (misaligned / f"{split}.source").write_text("a b\n")
        (misaligned / f"{split}.target").write_text("A\nB\n")
    changes = {"device": {"device": "cuda"}, "data": {"data": str(misaligned)}}
    changes["norm"] = {"model": dataclasses.replace(TINY, norm="laier")}
    expected = {
        "device": pytest.raises(ValueError, match=r"for 1 GPU, PyTorch finds 0 here; give --device cpu"),
        "data": pytest.raises(ValueError, match=r"train\.source ends at line 1, before .*train\.target"),
        "norm": pytest.raises(ValueError, match="named 'laier'"),
        "interrupted": pytest.raises(KeyboardInterrupt),
    }
    run = dataclasses.replace(SMALL, seed=1, **changes.get(wrong, {}))
    with expected[wrong]:
        train(run, there, on_progress=lambda progress: (_ for _ in ()).throw(KeyboardInterrupt))
    assert {path: path.read_bytes() for path in there.rglob("*") if path.is_file()} == before


# -- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"lr": -1.0}, "lr must be above 0; got -1.0"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1; got 1.0"),
        ({"schedule": "linear"}, "schedule must be one of cosine"),
        (
            {"schedule": "inverse_sqrt", "warmup": 0},
            r"warmup must be at least 1 for schedule=inverse_sqrt \(.*\); got 0",
        ),
        ({"average": 9, "checkpoint_every": 1}, "average must be at most keep=5; got 9"),
        ({"strategy": "fsdp2", "devices": 2}, "record_every must be 0 for strategy=fsdp2; got 25"),
        ({"precision": "foo"}, "precision must be one of 32-true, bf16-mixed, 16-mixed; got 'foo'"),
        ({"lr": math.inf}, "lr must be a finite number; got inf"),
        ({"weight_decay": math.nan}, "weight_decay must be a finite number; got nan"),
        ({"steps": "12"}, "steps must be a whole number; got '12'"),
        ({"betas": (0.9,)}, r"betas must be 2 finite numbers; got \(0\.9,\)"),
        ({"betas": (2, 3)}, r"betas must be two numbers, each at least 0 and below 1; got \(2, 3\)"),
        ({"threads": -1}, "threads must be at least 1 and at most 1024; got -1"),
        ({"device": "gpu"}, "device must be one of auto, cpu, cuda; got 'gpu'"),
        ({"valid_bleu": True}, "valid_bleu must be left out for task g2p; it applies to mt; got True"),
        ({"task": "lm", "beam": 5}, "beam must be left out for task lm; it applies to g2p and mt; got 5"),
        ({"model": dataclasses.replace(TINY, mask_logits=True)}, "model.mask_logits must be left out for task g2p"),
        ({"average": 2}, "average must be 0 without checkpoint_every; got 2"),
    ],
)
def test_impossible_settings_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize("how", [{"strategy": "fsdp2", "record_every": 0}, {"norm": "batch(sync=True)"}])
def test_layer_drop_with_several_processes_raises(how):
    norm, how = how.get("norm", "batch"), {name: value for name, value in how.items() if name != "norm"}
    model = dataclasses.replace(TINY, norm_at={"*.final": norm}, layer_drop=0.2)
    dataclasses.replace(SMALL, model=model, **how)
    dataclasses.replace(SMALL, model=dataclasses.replace(TINY, norm=norm), devices=2, **how)
    with pytest.raises(ValueError, match=r"model\.layer_drop must be 0 for fsdp2 and sync=True: .*; got 0\.2"):
        dataclasses.replace(SMALL, model=model, devices=2, **how)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "g2"}, "no task named 'g2' .did you mean 'g2p'"),
        ({"data": "cmudikt"}, "no data set named 'cmudikt' .did you mean 'cmudict'"),
        ({"model": dataclasses.replace(TINY, norm="laier")}, "no norm named 'laier' .did you mean 'layer'"),
        ({"model": dataclasses.replace(TINY, norm="un(windw=2)")}, "named 'windw' .did you mean 'window'"),
    ],
)
def test_unknown_names_raise_with_the_nearest(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(SMALL, **changes), tmp_path)


def test_pick_names_what_there_is():
    with pytest.raises(ValueError, match="there is no recipe named 'zzz'; there are g2p_cmudict, lm_pydoc, "):
        pick(RECIPES, "zzz", "recipe")


def test_a_folder_without_a_run_raises(tmp_path):
    with pytest.raises(ValueError, match="is not a run folder: there is no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"is not a run folder: it has no run\.json"):
        load(tmp_path)
    (tmp_path / "run.json").write_text('{"name": "x"}')
    with pytest.raises(ValueError, match="not the settings of a run"):
        load(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="not the settings of a run"):
        load(tmp_path)
    (tmp_path / "run.json").write_text(SMALL.to_json())
    with pytest.raises(ValueError, match=r"vocab\.json is missing; copy it"):
        load(tmp_path)
    (tmp_path / "vocab.json").write_text('{"source": ["a"], "target": ["A"]}')
    with pytest.raises(ValueError, match=r"model\.safetensors is missing; the run may not have ended yet"):
        load(tmp_path)


def test_weights_cut_short_or_of_another_model_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), normkit.UN(4))
    path = tmp_path / "model.safetensors"
    save_weights(model, path)
    with pytest.raises(
        ValueError, match=r"is of another model: it has 0\.weight of shape \(4, 3\) in place of \(4, 2\)"
    ):
        load_weights(nn.Sequential(nn.Linear(2, 4), normkit.UN(4)), path)
    with pytest.raises(ValueError, match=r"is of another model: it has an unknown 1\.\w+ and \d+ more differences"):
        load_weights(nn.Sequential(nn.Linear(3, 4)), path)
    with pytest.raises(ValueError, match=r"is of another model: it has no 2\.weight"):
        load_weights(nn.Sequential(nn.Linear(3, 4), normkit.UN(4), nn.Linear(4, 4)), path)
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is cut short or not a safetensors file"):
            load_weights(model, path)


def test_shared_weights_are_saved_once_and_stay_shared(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    save_weights(model, tmp_path / "w")
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    other[1].weight = other[0].weight
    load_weights(other, tmp_path / "w")
    assert other[1].weight is other[0].weight
    torch.testing.assert_close(other[1].weight, model[0].weight, rtol=0, atol=0)


def test_no_space_left_keeps_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    model = nn.Linear(3, 3)
    save_weights(model, path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left.*model\.safetensors"):
        save_weights(nn.Linear(3, 3), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path], "no half file is left behind"


def test_counters_are_not_averaged():
    states = [{"w": torch.tensor([1.0]), "step": torch.tensor(3)}, {"w": torch.tensor([2.0]), "step": torch.tensor(5)}]
    mean = mean_weights(states)
    assert mean["w"].tolist() == [1.5]
    assert mean["step"].item() == 5


# -- folding a run ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "foldable"),
    [
        (dataclasses.replace(TINY, norm="un(warmup=4)"), "7 of 7"),
        (dataclasses.replace(TINY, norm="un(warmup=4)", fixnorm=True, tie=True), "7 of 7"),
        (dataclasses.replace(TINY, norm="layer", norm_at={"decoder.*": "batch"}), "4 of 7"),
        (dataclasses.replace(TINY, norm="pnv", placement="post"), None),
    ],
)
def test_a_folded_run_is_a_run_with_the_same_answers(model, foldable, tmp_path):
    train(dataclasses.replace(SMALL, model=model), tmp_path / "run")
    loaded = load(tmp_path / "run")
    report = audit_run(loaded)
    assert foldable is None or report.foldable == foldable
    folded, report = fold_run(loaded)
    assert report.max_error < 1e-9
    save(tmp_path / "folded", folded)
    again = load(tmp_path / "folded")
    source, target = TASKS["g2p"].load("example")(loaded.run.model, loaded.vocabularies)
    torch.testing.assert_close(again.model(source, target), loaded.model(source, target), atol=1e-4, rtol=1e-4)
    assert again.run.model.tie == model.tie


def test_a_result_lists_the_quantities_that_are_recorded(tmp_path):
    run = dataclasses.replace(SMALL, steps=2, quantities=["rms", "pnac_activation"])
    assert Run.from_json(run.to_json()) == run
    with pytest.raises(ValueError, match="no quantity 'rsm'"):
        dataclasses.replace(SMALL, quantities=("rsm",))
    train(run, tmp_path)
    rows = (tmp_path / "rows.csv").read_text().splitlines()
    recorded = {row.split(",")[-2] for row in rows[1:]}
    assert "rms" in recorded
    assert not {name for name in recorded if name.startswith(("distance", "drift_"))}


def test_a_result_names_what_trained_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    assert environment()["device"] == "a GPU"
    assert environment(count=8)["device"] == "8 x a GPU"
    assert environment("cpu")["device"] not in ("a GPU", "")
