"""Detectors: norms that see pictures and not their padding, folding, training.

Average precision.
"""

import dataclasses
import importlib
import json

import pytest
import safetensors.torch
import scene_files
import torch
from normkit_papers.data.scenes import find_scenes
from normkit_papers.models.config import Model
from normkit_papers.models.detection import DETECTORS, detector
from normkit_papers.models.torchvision_ops import load_torchvision, nms, roi_align
from normkit_papers.recipes import RECIPES
from normkit_papers.train.build import build_model
from normkit_papers.train.config import DetectionRun
from normkit_papers.train.detection import Detection, Item, Samples, SceneAugmentation
from normkit_papers.train.fold_run import fold_run
from normkit_papers.train.folder import Loaded, load, save
from normkit_papers.train.run import train
from normkit_papers.train.scores import average_precision, precision_metric
from normkit_papers.train.weights import start_from
from test_resume import everything, killed_at, same
from third_party_models import randomize

import normkit
from normkit.models import find
from normkit.norms import StatNorm

pytest.importorskip("torchvision")
pytest.importorskip("pycocotools")

TINY = dataclasses.replace(
    DETECTORS["mask_rcnn_pocket"], width=8, depths=(1, 1, 1, 1), heads=(1, 1, 2, 2), pyramid=16, hidden=16,
    mask_layers=(16,), sizes=(48, 64), longest=96, proposals=30, samples=16,
)  # fmt: skip
RUN = DetectionRun(
    name="tiny", data="", model=Model(arch="tiny", norm="un"), steps=4, batch_tokens=2, valid_every=2,
    checkpoint_every=2, record_every=2, threads=1,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    monkeypatch.setattr("normkit_papers.train.detection.Detection.calibration_batches", 3)
    monkeypatch.setitem(DETECTORS, "tiny", TINY)
    monkeypatch.setitem(DETECTORS, "tiny_boxes", dataclasses.replace(TINY, masks=False))


def pictures() -> tuple[list, list]:
    """Two pictures of different sizes, one without things, one of another shape."""
    generator = torch.Generator().manual_seed(0)
    targets = [
        {"boxes": torch.tensor([[5.0, 5, 30, 35], [20, 15, 45, 45]]), "labels": torch.tensor([1, 2]),
         "masks": torch.ones(2, 50, 70, dtype=torch.uint8)},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long),
         "masks": torch.zeros(0, 90, 40, dtype=torch.uint8)},
    ]  # fmt: skip
    return [torch.rand(3, 50, 70, generator=generator), torch.rand(3, 90, 40, generator=generator)], targets


# -- operators that the compiled part of torchvision may lack ------------------------------------------------------


def boxes(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    corner, side = (size * torch.rand(count, 2, generator=generator) for size in (20, 10))
    return torch.cat([corner, corner + side], 1)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("count", [0, 1, 150])
def test_nms_equals_the_loop_over_boxes(count, threshold):
    b, scores = boxes(count), torch.rand(count).round(decimals=1)  # with equal ones
    overlap, kept = load_torchvision().ops.box_iou(b, b), []
    for i in scores.argsort(descending=True, stable=True).tolist():
        if not any(overlap[i, j] > threshold for j in kept):
            kept.append(i)
    assert nms(b, scores, threshold).tolist() == kept
    assert torch.equal(torch.ops.torchvision.nms(b, scores, threshold), nms(b, scores, threshold))


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("samples", [2, 1, 0])
def test_roi_align_is_torchvisions_own_in_pytorch(samples, aligned):
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64, requires_grad=True)
    rois = torch.cat([torch.tensor([[1.0], [0], [1], [0], [1]]), 0.4 * boxes(5, seed=2)], 1).double()
    theirs = importlib.import_module("torchvision.ops.roi_align")._roi_align.__wrapped__  # not compiled
    results = [align(x, rois, 0.7, 3, 4, samples, aligned) for align in (roi_align, theirs)]
    torch.testing.assert_close(*results)
    seed = torch.randn_like(results[0])
    torch.testing.assert_close(*(torch.autograd.grad(y, x, seed)[0] for y in results))
    assert roi_align(x, rois[:0], 0.7, 3, 4, samples, aligned).shape == (0, 3, 3, 4)


# -- the model -----------------------------------------------------------------------------------------------------


def test_norms_of_detectors_are_placed_in_the_backbone():
    model = detector(Model(arch="tiny", norm="un", norm_at={"*.norms.*": "layer"}), classes=2)
    kinds = {name: type(model.get_submodule(name)) for name in find(model)}
    assert all(name.startswith("backbone.body.") for name in kinds)
    assert [kind for name, kind in kinds.items() if ".norms." in name] == [normkit.LayerNorm] * 4
    assert {kind for name, kind in kinds.items() if ".norms." not in name} == {normkit.UN}
    with pytest.raises(ValueError, match="no detector named 'yolo'; there are mask_rcnn_swin_t, "):
        detector(Model(arch="yolo"), classes=2)


def test_statistics_exclude_image_padding():
    """Masks reach every norm; the first one's statistics are those of the covered tokens."""
    model = detector(Model(arch="tiny", norm="pnv"), classes=2).train()
    images, targets = pictures()
    seen = {}
    norms = {name: m for name, m in model.named_modules() if isinstance(m, StatNorm)}
    for name, norm in norms.items():
        norm.register_forward_hook(lambda m, args, out, name=name: seen.update({name: (args[0], m.mask)}))
    before = {name: norm.running.clone() for name, norm in norms.items()}
    model(images, targets)
    for name, (x, mask) in seen.items():
        stride = 96 // x.shape[1]
        real = sum(-(-image.shape[-2] // stride) * -(-image.shape[-1] // stride) for image in images)
        assert mask.shape == x.shape[:-1], name
        assert int(mask.sum()) == real < mask.numel(), name
        square = x[mask].double().square().mean(0)
        norm = norms[name]
        expected = norm.alpha * before[name][0] + (1 - norm.alpha) * square
        torch.testing.assert_close(norm.running[0].double(), expected, rtol=1e-4, atol=1e-6)


def test_weights_of_a_classifier_start_the_backbone(tmp_path):
    donor = randomize(detector(Model(arch="tiny", norm="un"), classes=2))
    for norm in donor.modules():
        if isinstance(norm, StatNorm):
            norm.step.fill_(7)
    features = {f"features.{k}": v for k, v in donor.backbone.body.features.state_dict().items()}
    safetensors.torch.save_file({**features, "head.weight": torch.zeros(3, 64)}, tmp_path / "swin.safetensors")
    model = detector(Model(arch="tiny", norm="un"), classes=5)
    assert start_from(str(tmp_path / "swin.safetensors"), model.backbone.body.features, prefix="features.") == []
    for name, tensor in model.backbone.body.features.state_dict().items():
        same = torch.equal(tensor, features[f"features.{name}"])
        assert same or name.endswith((".step", ".window", ".psi", ".window_grad", "_grad")), name
        assert not name.endswith(".step") or tensor == 0
    features["features.1.7.mlp.0.weight"] = torch.zeros(2, 2)
    safetensors.torch.save_file(features, tmp_path / "deeper.safetensors")
    with pytest.raises(ValueError, match=r"1\.7\.mlp\.0\.weight"):  # once loaded without a word
        start_from(str(tmp_path / "deeper.safetensors"), model.backbone.body.features, prefix="features.")


# -- data to batches -----------------------------------------------------------------------------------------------


def test_augmentation_changes_picture_boxes_and_masks_alike(tmp_path):
    """Each box stays the frame of its mask, and masks stay on what is drawn."""
    data = find_scenes(str(scene_files.data_set(tmp_path)))()
    cropping = dataclasses.replace(TINY, crop=(30, 50))
    samples = Samples(data.train, masks=True, augment=SceneAugmentation(cropping))
    sizes, things = set(), 0
    for epoch in range(6):
        for at in range(len(data.train)):
            picture, target = samples[Item(epoch, at)]
            again, _ = samples[Item(epoch, at)]
            assert torch.equal(picture, again), "chance hangs on seed, epoch and number alone"
            sizes.add(tuple(picture.shape[-2:]))
            assert len(target["boxes"]) == len(target["labels"]) == len(target["masks"])
            assert target["masks"].shape[-2:] == picture.shape[-2:]
            for box, mask in zip(target["boxes"], target["masks"], strict=True):
                rows, columns = (mask.any(side).nonzero()[:, 0] for side in (1, 0))
                frame = torch.stack([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]).float()
                assert (frame - box).abs().max() <= 2, "masks are resized by nearest pixels"
                bright = picture.amax(0)[mask.bool()]
                assert (bright > 0.7).float().mean() > 0.7
                things += 1
    assert len(sizes) > 4
    assert things > 20


@pytest.mark.parametrize("bucketing", [False, True])
def test_batches_resume_and_do_not_depend_on_workers(bucketing, tmp_path):
    data = find_scenes(str(scene_files.data_set(tmp_path, 8)))()
    run = dataclasses.replace(RUN, bucketing=bucketing, seed=0 if bucketing else 20_260_101)
    task = Detection(run, build_model("detection", run.model, data.vocabularies), data)
    at = task.batches(0)
    first = [next(at) for _ in range(6)]
    other = Detection(dataclasses.replace(run, workers=2), task.model, data).batches(3)
    for batch in first[3:]:
        same = next(other)
        for mine, theirs in zip(batch.tensors[0], same.tensors[0], strict=True):
            assert torch.equal(mine, theirs)
    shapes = [{round(t["masks"].shape[-1] / t["masks"].shape[-2]) for t in b.tensors[1]} for b in first]
    assert not bucketing or sum(len(shape) == 1 for shape in shapes) >= 4


# -- precision -----------------------------------------------------------------------------------------------------


def test_perfect_answers_have_precision_100_and_none_has_0(tmp_path):
    data = find_scenes(str(scene_files.data_set(tmp_path)))().test
    truth = [data.objects(at, masks=True) for at in range(len(data))]
    perfect = [{**each, "scores": torch.ones(len(each["labels"])), "masks": each["masks"] > 0} for each in truth]
    shifted = [{**each, "boxes": each["boxes"] + 3.0} for each in perfect]
    none = [{name: tensor[:0] for name, tensor in each.items()} for each in perfect]
    found = []
    for answers in (perfect, shifted, none):
        metric = precision_metric(masks=True)
        metric.update(answers, truth)
        found.append(average_precision(metric))
    assert found[0]["box_ap"] == found[0]["mask_ap"] == pytest.approx(100)
    assert 0 < found[1]["box_ap"] < 90
    assert found[2] == dict.fromkeys(found[0], 0.0)


def test_recall_is_compared_in_float64_as_by_coco():
    corners, ones = 100.0 * torch.arange(10)[:, None].expand(10, 2), torch.ones(10, dtype=torch.long)
    truth = {"boxes": torch.cat([corners, corners + 50], 1), "labels": ones}
    metric = precision_metric(masks=False)
    metric.update([{**{name: tensor[:2] for name, tensor in truth.items()}, "scores": torch.ones(2)}], [truth])
    assert average_precision(metric)["box_ap"] == pytest.approx(100 * 21 / 101), "2 of 10: recalls 0 to 0.2"


# -- runs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe().task == "detection"])
def test_every_recipe_runs_two_steps(name, tmp_path, monkeypatch):
    recipe = RECIPES[name]()
    own = DETECTORS[recipe.model.arch]
    crop = own.crop and (30, 50)
    monkeypatch.setitem(DETECTORS, recipe.model.arch, dataclasses.replace(TINY, masks=own.masks, crop=crop))
    run = dataclasses.replace(
        recipe, data=str(scene_files.data_set(tmp_path / "data")), model=dataclasses.replace(recipe.model, norm="un"),
        steps=2, warmup=0, milestones=(1,) if recipe.milestones else (), batch_tokens=2, valid_every=0,
        checkpoint_every=0, workers=0, record_every=1, precision="32-true", threads=1,
    )  # fmt: skip
    result = train(run, tmp_path / "run")
    assert result["status"] == "done"
    assert set(result["scores"]) == {"running", "calibrated"}
    for score in result["scores"].values():
        assert score["n"] == 6
        assert {"box_ap", "loss_objectness"} <= set(score)
        assert ("mask_ap" in score) == own.masks
    assert result["data"]["train"] == {"images": 6, "boxes": result["data"]["train"]["boxes"]}
    assert result["data"]["operators"]


def test_run_learns_resumes_and_folds_equally(tmp_path):
    data = str(scene_files.data_set(tmp_path / "data"))
    run = dataclasses.replace(RUN, data=data, steps=8, lr=2e-3, valid_every=4, checkpoint_every=4)
    whole = train(run, tmp_path / "whole")
    assert whole["curve"][-1]["train_loss"] < whole["curve"][0]["train_loss"]
    assert [each["step"] for each in whole["valid"]] == [4, 8]
    same(killed_at(run, tmp_path / "parts", 5), everything(tmp_path / "whole"))
    loaded = load(tmp_path / "whole")
    loaded = Loaded(loaded.run, randomize(loaded.model), loaded.vocabularies)  # gains and biases that show
    folded, report = fold_run(loaded)
    assert report.max_error < 1e-9
    outcomes = {row.name: row.action for row in report}
    assert set(outcomes.values()) <= {"folded", "folded back"}, "also where Swin pads: earlier layers take the shift"
    save(tmp_path / "folded", folded)
    back = load(tmp_path / "folded")
    with torch.no_grad():
        for mine, theirs in zip(back.model(pictures()[0]), loaded.model(pictures()[0]), strict=True):
            torch.testing.assert_close(mine["boxes"], theirs["boxes"], atol=1e-2, rtol=1e-3)
            torch.testing.assert_close(mine["scores"], theirs["scores"], atol=1e-4, rtol=1e-3)
    with pytest.raises(ValueError, match="has no norms left to fold"):
        fold_run(folded)
    scores = [Detection(l.run, l.model, find_scenes(data)()).validate() for l in (loaded, back)]  # noqa: E741
    assert scores[0]["box_ap"] == pytest.approx(scores[1]["box_ap"], abs=1e-6)
    assert scores[0]["loss"] == pytest.approx(scores[1]["loss"], rel=1e-4)
    assert json.loads((tmp_path / "folded" / "run.json").read_text())["model"]["norm"] == "nonorm"
    few = Detection(dataclasses.replace(run, valid_items=1), back.model, find_scenes(data)())
    assert few._score(few.data.valid, 0)["n"] > few.validate()["n"] == 1
