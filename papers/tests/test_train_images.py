"""Training on images: augmentation, averaging, fine-tuning, every recipe for two steps."""

import copy
import dataclasses
import functools
import random

import image_files as made
import numpy as np
import pytest
import torch
from corpus_files import cache_with_kernels
from normkit_papers.data.images import ImageData, ImageSplit, read_images
from normkit_papers.data.vocab import Vocab
from normkit_papers.models.classifiers import classifier
from normkit_papers.models.config import Model
from normkit_papers.recipes import RECIPES
from normkit_papers.train import images as task_images
from normkit_papers.train.config import ImageRun, Images
from normkit_papers.train.folder import load
from normkit_papers.train.images import ImageAugmentation, ImageBatches, ImageClassification, moving_average
from normkit_papers.train.run import train
from normkit_papers.train.weights import save_weights, start_from
from test_resume import everything, killed_at, same
from torch import nn
from torch.optim.swa_utils import AveragedModel

import normkit

TINY = Model(arch="tiny_vit", image_size=16, patch=8, width=16, hidden=16, depth=1, heads=2)
SMALL = ImageRun(name="small", data="", model=TINY, steps=6, batch_tokens=8, warmup=2, lr=1e-2, threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made.write_folder(tmp_path_factory.mktemp("pictures"), train=48, val=12)


@pytest.fixture(autouse=True)
def cheap(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_CACHE", str(cache_with_kernels(tmp_path / "cache")))
    monkeypatch.setattr(task_images.ImageClassification, "calibration_batches", 2)


def album(size=32, count=12):
    split = ImageSplit(*made.pixels(count, size=size))
    return ImageData(name="made", train=split, valid=split, test=split, vocabularies={"classes": Vocab("abc")},
                     mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))  # fmt: skip


def shown(settings, data, size=32, seed=5):
    loader = ImageBatches(data.train, ImageAugmentation(settings, data, size), seed)
    return loader[7, range(8)]


# -- what a model is shown -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        Images(),
        Images(crop="area", rand_augment="rand-m9-mstd0.5-inc1", erase=0.5, mixup=0.8, cutmix=1.0),
        Images(cutmix=1.0),
    ],
)
def test_a_batch_is_a_function_of_seed_and_number(settings):
    data = album(size=24)
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    one, two, other = shown(settings, data), shown(settings, data), shown(settings, data, seed=6)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not torch.equal(one[0], other[0])
    assert one[0].shape == (8, 3, 32, 32)
    assert torch.equal(states[0], torch.get_rng_state()), "dropout's chance is left alone"
    assert np.array_equal(states[1], np.random.get_state()[1])  # noqa: NPY002
    assert states[2] == random.getstate()


def test_loss_of_soft_classes_follows_the_formula():
    data = album()
    task = ImageClassification(dataclasses.replace(SMALL, images=Images(mixup=0.8)), classifier(TINY, 3), data)
    batch = next(task.batches(0))
    images, shares = batch.tensors
    logs = torch.log_softmax(task.model(images), 1)
    wanted = -((0.9 * shares + 0.1 / 3) * logs).sum(1).mean()
    torch.testing.assert_close(task.loss(batch, 0.1), wanted)


# -- the average of the weights --------------------------------------------------------------------------------------


def test_nothing_is_chosen_by_the_test_split(folder, tmp_path):
    run = dataclasses.replace(SMALL, data=str(folder), valid_every=2, patience=1)
    with pytest.raises(ValueError, match="held_out"):
        train(run, tmp_path / "run")
    train(dataclasses.replace(run, steps=2, images=Images(held_out=8)), tmp_path / "run")


@pytest.mark.parametrize("norm", ["un(window=2, warmup=2)", "batch", "torch"])
def test_the_average_of_weights_and_statistics(norm):
    torch.manual_seed(0)
    layer = nn.BatchNorm1d(4) if norm == "torch" else normkit.make(norm, 4)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    update = moving_average(0.9)._kwargs["multi_avg_fn"]
    average = AveragedModel(model, multi_avg_fn=update, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wanted = None
    for _ in range(5):
        ((model(torch.randn(8, 4)) - torch.randn(8, 4)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        now = {name: value.double().numpy().copy() for name, value in model.state_dict().items()}
        wanted = now if wanted is None else {name: 0.9 * wanted[name] + 0.1 * now[name] for name in now}
    whole = {name for name, value in model.state_dict().items() if not value.is_floating_point()}
    assert whole, "it has counters"
    for name, value in average.module.state_dict().items():
        if name in whole:
            assert torch.equal(value, model.state_dict()[name]), f"{name} is the model's own"
        else:
            np.testing.assert_allclose(value.numpy(), wanted[name], rtol=1e-5, atol=1e-6, err_msg=name)
    steps = [
        float(value) for name, value in average.module.state_dict().items() if name in whole and "skip" not in name
    ]
    assert 5.0 in steps


def test_bfloat16_in_compiled_graphs_trains_the_same_model(folder, tmp_path, monkeypatch):
    graphs = functools.partialmethod(torch.nn.Module.compile, backend="aot_eager")  # Inductor needs a C++ compiler
    monkeypatch.setattr(torch.nn.Module, "compile", graphs)
    model = dataclasses.replace(TINY, norm="un(warmup=2)")
    run = dataclasses.replace(SMALL, data=str(folder), model=model, steps=3, valid_every=3, lr=1e-3)
    slow = train(run, tmp_path / "float32")
    fast = train(dataclasses.replace(run, precision="bf16-mixed", compile=True), tmp_path / "compiled")
    for ours, theirs in zip(fast["curve"] + fast["valid"], slow["curve"] + slow["valid"], strict=True):
        losses = [each.get("train_loss", each.get("loss")) for each in (ours, theirs)]
        assert losses[0] == pytest.approx(losses[1], rel=2**-7), ours  # bfloat16 has 8 bits
        assert losses[0] != losses[1], "it was not in bfloat16"
    buffers = dict(load(tmp_path / "compiled").model.named_buffers())
    assert {buffer.dtype for buffer in buffers.values() if buffer.is_floating_point()} == {torch.float32}


def test_averaged_run_resumes_to_the_same_bits(folder, tmp_path):
    model = dataclasses.replace(TINY, norm="un(warmup=2)", dropout=0.1)
    run = dataclasses.replace(
        SMALL, data=str(folder), model=model, ema=0.5, images=Images(mixup=0.5, held_out=8), checkpoint_every=3,
        valid_every=3, keep=9, workers=1,
    )  # fmt: skip
    result = train(run, tmp_path / "a")
    assert result["status"] == "done"
    assert set(result["valid"][0]) == {"step", "loss", "accuracy"}
    raw = torch.load(tmp_path / "a/checkpoints/step-00000006.ckpt", weights_only=True)
    kept = load(tmp_path / "a").model.state_dict()
    differs = False
    for name, value in kept.items():
        assert torch.equal(value, raw["state_dict"][f"model.{name}"]), f"{name} is of the average"
        differs |= not torch.equal(value, raw["current_model_state"][f"model.{name}"])
    assert differs
    same(killed_at(run, tmp_path / "b", 4), everything(tmp_path / "a"))


# -- fine-tuning -----------------------------------------------------------------------------------------------------


def test_fine_tuning_starts_the_head_and_the_warm_up_reset(tmp_path):
    config = dataclasses.replace(TINY, norm="un(warmup=2)")
    torch.manual_seed(1)
    old = classifier(config, 5)
    for _ in range(4):
        old(torch.randn(4, 3, 16, 16)).square().mean().backward()
    save_weights(old, tmp_path / "model.safetensors")
    new = classifier(config, 3)
    reset = start_from(str(tmp_path), new, new.head)
    assert sorted(reset) == ["head.bias", "head.weight"]
    before, after = old.state_dict(), new.state_dict()
    steps = [name for name in after if name.endswith("step")]
    assert all(int(before[name]) == 4 and int(after[name]) == 0 for name in steps)
    for name in after.keys() - {"head.weight", "head.bias", *steps}:
        if name.endswith((".running", ".weight", ".bias", "positions")):
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=0)

    other = classifier(dataclasses.replace(TINY, norm="layer"), 3)
    found = start_from(str(tmp_path), other, other.head)
    assert sorted(found) == ["head.bias", "head.weight"], "statistics are left behind"
    deeper = classifier(dataclasses.replace(config, depth=2), 3)
    with pytest.raises(ValueError, match=r"encoder\.layers\.1"):
        start_from(str(tmp_path), deeper, deeper.head)
    (tmp_path / "weights.pth").write_bytes(b"pickle")
    with pytest.raises(ValueError, match=r"weights\.pth"):
        start_from(str(tmp_path / "weights.pth"), new, new.head)


def test_all_parameters_are_fine_tuned_the_final_norm_too(folder, tmp_path):
    model = classifier(TINY, 3)
    save_weights(model, tmp_path / "w.safetensors")
    run = dataclasses.replace(SMALL, weights=str(tmp_path / "w.safetensors"), body_lr=0.01, weight_decay=0.1, lr=0.5)
    task = ImageClassification(run, model, album())
    groups = task.parameter_groups()
    numbers = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(numbers) == sorted(id(parameter) for parameter in model.parameters()), "each once"
    rate = {id(p): (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert rate[id(model.encoder.final_norm.weight)] == (0.005, 0.0)
    assert rate[id(model.head.weight)] == (0.5, 0.1)
    assert rate[id(model.patches.weight)] == (0.005, 0.1)
    with pytest.raises(ValueError, match="body_lr"):
        ImageClassification(dataclasses.replace(run, weights=""), copy.deepcopy(model), album()).load_pretrained()


# -- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "workers"), [("train/class0/0003.png", 1), ("val/class1/0001.png", 0)])
def test_an_image_that_cannot_be_read_is_named(path, workers, tmp_path):
    folder = made.write_folder(tmp_path / "data", train=16, val=9)
    (folder / path).write_text("no picture")
    run = dataclasses.replace(SMALL, data=str(folder), steps=2, workers=workers)
    with pytest.raises(ValueError, match=rf"^\S*{path} cannot be read"):
        train(run, tmp_path / "run")


def test_workers_make_the_same_batches(folder):
    run = dataclasses.replace(SMALL, images=Images(rand_augment="rand-m9-mstd0.5-inc1", cutmix=1.0))
    data = read_images(str(folder))
    task = ImageClassification(run, classifier(TINY, 3), data)
    alone = [batch for batch, _ in zip(task.batches(2), range(3), strict=False)]
    by_two = ImageClassification(dataclasses.replace(run, workers=2), task.model, data).batches(2)
    for one in alone:
        for a, b in zip(one.tensors, next(by_two).tensors, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe().task == "images"])
def test_two_steps_of_every_recipe(name, tmp_path, monkeypatch):
    recipe = RECIPES[name]()
    made.write_folder(tmp_path / recipe.data, train=40)
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    model = dataclasses.replace(recipe.model, image_size=32)
    if recipe.body_lr != 1:
        save_weights(classifier(model, 7), tmp_path / "old.safetensors")
    run = dataclasses.replace(
        recipe, model=model, images=dataclasses.replace(recipe.images, held_out=min(recipe.images.held_out, 4)),
        steps=2, batch_tokens=4, warmup=0, milestones=(1,) * bool(recipe.milestones), valid_every=1, checkpoint_every=0,
        devices=1, workers=0, device="cpu", threads=1, record_every=0, precision="32-true",
        weights=str(tmp_path / "old.safetensors") if recipe.body_lr != 1 else "",
    )  # fmt: skip
    result = train(run, tmp_path / "run")
    assert result["status"] == "done"
    assert [each["step"] for each in result["valid"]] == [1, 2]
    assert all(np.isfinite(list(score.values())).all() for score in result["scores"].values())
    assert "training images" in result["data"]["name"]
