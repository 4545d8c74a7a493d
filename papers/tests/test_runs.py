"""Runs of every embedded recipe, their folders, refusals, and the contents of results."""

import dataclasses
import json
import math
import re
import time

import pytest
import torch
from corpus_files import write_pairs
from forked import Program
from normkit_papers.data.corpora import CORPORA
from normkit_papers.data.embedded import SOURCES
from normkit_papers.data.images import IMAGE_SETS
from normkit_papers.data.scenes import SCENE_SETS
from normkit_papers.models.config import Model
from normkit_papers.recipes import RECIPES
from normkit_papers.tasks import TASKS
from normkit_papers.train.build import build_model, example_input
from normkit_papers.train.config import DigitsRun, G2PRun
from normkit_papers.train.fold_run import audit_run, fold_run
from normkit_papers.train.folder import checkpoints, load, locked, save
from normkit_papers.train.run import train
from normkit_papers.train.translation import Translation
from normkit_papers.train.weights import load_weights, model_state, read_checkpoint, save_weights
from test_resume import checkpoint_path
from torch import nn

import normkit

EMBEDDED = [name for name, recipe in RECIPES.items() if recipe().data in SOURCES]
TINY = Model(width=16, hidden=24, depth=1, heads=2)
SMALL = G2PRun(name="small", data="cmudict", model=TINY, steps=12, batch_tokens=200, warmup=3, test_items=20, threads=1)


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
        threads=1, **({"test_items": 20} if hasattr(recipe, "test_items") else {}),
    )  # fmt: skip
    ticks = []
    result = train(run, tmp_path, on_progress=ticks.append, command="as typed")
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(result))
    assert (result["status"], result["command"]) == ("done", "as typed")
    assert [point["step"] for point in result["valid"]] == [12, 24]
    losses = [point["train_loss"] for point in result["curve"]]
    assert len(losses) == 24
    assert sum(losses[-4:]) < sum(losses[:4])
    assert (ticks[0].step, ticks[0].stage) == (1, "training")
    assert all(math.isfinite(figure) for score in result["scores"].values() for figure in score.values())
    assert set(result["scores"]) >= ({"running", "calibrated"} if norm != "layer" else {"running"})
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert result["speed"]["train_tokens_per_s"] > 0

    again, model, vocabularies = load(tmp_path)
    assert (again, model.training) == (run, False)
    trained = model_state(read_checkpoint(checkpoints(tmp_path)[-1]))
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, trained[key], rtol=0, atol=0)
    read = SOURCES[run.data]().vocabularies
    assert {name: vocab.symbols for name, vocab in vocabularies.items()} == {k: v.symbols for k, v in read.items()}
    rows = (tmp_path / "rows.csv").read_text().splitlines()
    sites = sum(isinstance(module, normkit.Norm) for module in model.modules())
    assert sum(",rms," in row for row in rows) == 3 * sites, "steps 1, 9 and 17, every norm"
    assert sum("gradient_norm" in row for row in rows) == 3
    assert any(",constant_loss," in row for row in rows)


def test_tables_have_the_same_rows():
    assert {recipe().task for recipe in RECIPES.values()} == set(TASKS)
    assert all(recipe().data in {**SOURCES, **CORPORA, **IMAGE_SETS, **SCENE_SETS} for recipe in RECIPES.values())


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
    assert set(scores) == {"running", "calibrated", "beam"}
    assert scores["running"]["loss"] != scores["calibrated"]["loss"]
    for name, tensor in task.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_loss_that_is_not_finite_ends_the_run_with_a_row(tmp_path):
    run = dataclasses.replace(SMALL, steps=40, lr=1e30, warmup=0, clip=0.0, schedule="constant")
    result = train(run, tmp_path)
    assert result["status"].startswith("diverged at step ")
    step = int(result["status"].split()[-1])
    assert 1 < step <= 4
    assert all(math.isfinite(point["train_loss"]) for point in result["curve"])
    assert result["scores"] == {}


def test_accumulation_takes_several_batches_to_a_step(tmp_path):
    result = train(
        dataclasses.replace(SMALL, accumulate=3, steps=4, model=dataclasses.replace(TINY, norm="un")), tmp_path
    )
    assert [point["step"] for point in result["curve"]] == [1, 2, 3, 4]
    norm = load(tmp_path).model.encoder.final_norm
    assert int(norm.step) == 12, "statistics move with every batch"


def test_the_last_checkpoints_are_kept_and_averaged(tmp_path):
    run = dataclasses.replace(SMALL, model=dataclasses.replace(TINY, norm="un"), checkpoint_every=3, average=3, keep=3)
    assert train(run, tmp_path)["averaged"] == 3
    assert checkpoints(tmp_path) == [checkpoint_path(tmp_path, step) for step in (6, 9, 12)]
    states = [model_state(read_checkpoint(path)) for path in checkpoints(tmp_path)]
    for name, value in (model := load(tmp_path).model).state_dict().items():
        mean = sum(state[name].double() for state in states) / 3
        expected = states[-1][name] if not value.is_floating_point() else mean
        torch.testing.assert_close(value.double(), expected.double(), rtol=1e-6, atol=1e-7)
    assert int(model.encoder.final_norm.step) == 12


@pytest.mark.parametrize(
    "name", ["run.json", "checkpoints/epoch=3.ckpt", "model-00001-of-00002.safetensors", "notes.txt"]
)
def test_a_run_replaces_no_file(name, tmp_path):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text(SMALL.to_json())
    with pytest.raises(ValueError, match="--resume"):
        train(SMALL, tmp_path / "run")
    if name != "run.json":
        with pytest.raises(ValueError, match=re.escape(name.split("/")[0])):
            train(SMALL, tmp_path / "run", resume=True)
    assert [each.read_text() for each in tmp_path.rglob("*") if each.is_file()] == [SMALL.to_json()]


@pytest.mark.parametrize("wrong", ["device", "data", "norm"])
def test_a_run_that_cannot_start_leaves_no_folder(wrong, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    misaligned = write_pairs(tmp_path / "data", train_source="a b\n", train_target="A\nB\n")
    changes = {"device": {"device": "cuda"}, "data": {"data": str(misaligned)}}
    changes["norm"] = {"model": dataclasses.replace(TINY, norm="laier")}
    expected = {
        "device": pytest.raises(ValueError, match="--device cpu"),
        "data": pytest.raises(ValueError, match=r"train\.source"),
        "norm": pytest.raises(ValueError, match="named 'laier'"),
    }
    with expected[wrong]:
        train(dataclasses.replace(SMALL, **changes[wrong]), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("variables", "devices"), [({"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "4"}, 2),
                                                    ({"LOCAL_RANK": "1"}, 1)])  # fmt: skip
def test_another_number_of_processes_than_the_run_is_for_raises(variables, devices, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="--devices"):
        train(dataclasses.replace(SMALL, devices=devices, device="cpu"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


# -- bad input -------------------------------------------------------------------------------------------------------


def test_a_folder_without_a_run_raises(tmp_path):
    def raises(what):
        with pytest.raises(ValueError, match=what):
            load(tmp_path)

    with pytest.raises(ValueError, match="nowhere"):
        load(tmp_path / "nowhere")
    raises(r"run\.json")
    for text in ('{"name": "x"}', "{"):
        (tmp_path / "run.json").write_text(text)
        raises(r"run\.json")
    (tmp_path / "run.json").write_text(SMALL.to_json())
    raises(r"vocab\.json")
    (tmp_path / "vocab.json").write_text('{"source": ["a"], "target": ["A"]}')
    raises(r"model\.safetensors")


def test_weights_cut_short_or_of_another_model_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(3, 4), normkit.UN(4))
    path = tmp_path / "model.safetensors"
    save_weights(model, path)
    with pytest.raises(ValueError, match=r"0\.weight"):
        load_weights(nn.Sequential(nn.Linear(2, 4), normkit.UN(4)), path)
    with pytest.raises(ValueError, match=r"1\.\w+"):
        load_weights(nn.Sequential(nn.Linear(3, 4)), path)
    with pytest.raises(ValueError, match=r"2\.weight"):
        load_weights(nn.Sequential(nn.Linear(3, 4), normkit.UN(4), nn.Linear(4, 4)), path)
    whole = path.read_bytes()
    for length in (0, 7, 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="is cut short or not a safetensors file"):
            load_weights(model, path)


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
    source, target = example_input(loaded.run, loaded.vocabularies)
    torch.testing.assert_close(again.model(source, target), loaded.model(source, target), atol=1e-4, rtol=1e-4)
    assert again.run.model.tie == model.tie


# -- folders ---------------------------------------------------------------------------------------------------------

DIGITS = DigitsRun(
    name="folder", data="digits", model=Model(width=8, hidden=8, depth=1, heads=1), steps=6, batch_tokens=16,
    checkpoint_every=3, record_every=0, threads=1,
)  # fmt: skip
WORDS = dataclasses.replace(SMALL, steps=2, valid_items=4, test_items=4)


def test_only_one_process_writes_a_folder(tmp_path):
    code = (
        "import pathlib, sys, time\nfrom normkit_papers.train.folder import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n    print('locked', flush=True)\n    time.sleep(600)\n"
    )
    program = Program(code, str(tmp_path))
    while program.printed() != "locked\n":
        time.sleep(0.01)
    with pytest.raises(ValueError, match="another process"):
        train(DIGITS, tmp_path)
    program.process.kill()
    program.ended()
    with locked(tmp_path):  # the lock of a process that was killed is free
        pass
    assert list(tmp_path.iterdir()) == []


# -- attention on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("run", "allowed"), [(WORDS, False), (DIGITS, True)])
def test_batches_of_many_shapes_do_without_the_attention_that_plans_for_each(run, allowed, tmp_path):
    seen = {}
    before = torch.backends.cuda.cudnn_sdp_enabled()
    train(run, tmp_path, on_progress=lambda p: seen.update({p.stage: torch.backends.cuda.cudnn_sdp_enabled()}))
    assert before is torch.backends.cuda.cudnn_sdp_enabled() is True
    assert seen["training"] == allowed
    assert seen.get("scoring", allowed) == allowed
