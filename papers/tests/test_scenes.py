"""Pictures with boxes: what is read, what is refused, what is left out and counted."""

import copy
import json
import pathlib
import re
import struct

import numpy as np
import pytest
import scene_files
import torch
from normkit_papers.cli import main
from normkit_papers.data.coco import read_scenes
from normkit_papers.data.image_files import Broken, ImageFiles, image_size, read_image
from normkit_papers.data.scenes import SCENE_SETS, find_scenes
from normkit_papers.data.segmentation import decode_counts, drawable, filled, run_lengths
from normkit_papers.train.scores import average_precision

pytest.importorskip("PIL")
pytest.importorskip("pycocotools")

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def given():
    return scene_files.scenes(4)


def read(folder, given, files, broken="skip", **more):
    scene_files.write(folder, given, files, "train")
    return read_scenes(folder / "train.json", ImageFiles(folder / "images"), broken, **more)


def test_valid_annotations_are_read_unchanged(tmp_path, given):
    labels, files = given
    found = read(tmp_path, labels, files, "refuse")
    assert found.counts == {"images": 4, "boxes": len(labels["annotations"])}
    assert found.categories == {3: "box", 7: "bar"}
    for scene in found.scenes:
        own = [note for note in labels["annotations"] if note["image_id"] == scene.number]
        assert scene.boxes.tolist() == [[x, y, x + w, y + h] for x, y, w, h in (note["bbox"] for note in own)]
        assert scene.labels.tolist() == [{3: 1, 7: 2}[note["category_id"]] for note in own]
    assert found.image(1).shape == (3, 60, 80)
    masks = found.masks(0)
    for mask, (x1, y1, x2, y2) in zip(masks, found.scenes[0].boxes.int().tolist(), strict=True):
        expected = torch.zeros_like(mask)
        expected[y1:y2, x1:x2] = 1
        assert torch.equal(mask, expected)
    assert [note["id"] for note in found.truth["annotations"]] == list(range(1, 1 + len(labels["annotations"])))


def test_packed_files_are_the_same(tmp_path, given):
    labels, files = given
    plain = read(tmp_path / "plain", labels, files)
    scene_files.write(tmp_path / "packed", labels, files, "train", packed=True)
    packed = read_scenes(tmp_path / "packed" / "train.json.xz", ImageFiles(tmp_path / "packed" / "images.tar"))
    assert packed.counts == plain.counts
    assert all(torch.equal(packed.image(n), plain.image(n)) for n in range(4))


def test_run_lengths_are_outlines_too():
    from pycocotools import mask

    ring = [[1.0, 1, 4, 1, 4, 3, 1, 3]]
    solid = filled(ring, 5, 6)
    column = solid.T.flatten().tolist()  # COCO counts down the columns, zeros first
    counts, value = [], 0
    while column:
        run = next((n for n, each in enumerate(column) if each != value), len(column))
        counts.append(run)
        column, value = column[run:], 1 - value
    assert torch.equal(filled({"size": [5, 6], "counts": counts}, 5, 6), solid)
    assert torch.equal(filled(mask.frPyObjects({"size": [5, 6], "counts": counts}, 5, 6), 5, 6), solid)


def _second(notes, **changed):
    notes.append({**notes[0], "id": 900, **changed})


PROBLEMS = {  # words of the message: how to cause it
    "boxes without area": lambda labels, files: _second(labels["annotations"], bbox=[5, 5, 0, 3]),
    "boxes outside their image": lambda labels, files: _second(labels["annotations"], bbox=[500, 5, 9, 3]),
    "boxes given twice": lambda labels, files: _second(labels["annotations"]),
    "boxes cut at the edge": lambda labels, files: _second(labels["annotations"], bbox=[-9, 5, 20, 11]),
    "boxes that are not four numbers": lambda labels, files: _second(
        labels["annotations"], bbox=[1, 2, float("nan"), 3]
    ),
    "boxes that are not four numbers ": lambda labels, files: _second(labels["annotations"], bbox=[1, 2, 10**400, 3]),
    "outlines that cannot be drawn": lambda labels, files: _second(
        labels["annotations"], bbox=[1, 2, 3, 3], segmentation=[[1.0, 2.0, 3.0]]
    ),
    "boxes without area ": lambda labels, files: _second(labels["annotations"], bbox=[40.0, 5, 1e-9, 3]),
    "outlines that cannot be drawn ": lambda labels, files: _second(
        labels["annotations"], iscrowd=1, segmentation={"size": [88, 64], "counts": "PPPPPP04"}
    ),
    "images listed twice": lambda labels, files: labels["images"].append(dict(labels["images"][0])),
    "images of another size": lambda labels, files: labels["images"][0].update(width=81),
    "missing images": lambda labels, files: files.pop("001.png"),
    "images that cannot be read": lambda labels, files: files.update({"001.png": files["001.png"][:300]}),
    "images that cannot be read: 001.png ": lambda labels, files: files.update(
        {"001.png": b"P6 8x 6 255 " + b"0" * 99}
    ),
    "missing images  ": lambda labels, files: labels["images"][1].update(file_name="../images/001.png"),  # leads out
    "missing images ": lambda labels, files: labels["images"][1].update(file_name=300 * "x"),
}


@pytest.mark.parametrize("what", PROBLEMS)
def test_invalid_annotations_are_counted_or_raise(what, tmp_path, given):
    labels, files = copy.deepcopy(given)
    PROBLEMS[what](labels, files)
    less, what = what in list(PROBLEMS)[-6:], what.strip()
    found = read(tmp_path, labels, files)
    assert found.counts[what.split(":")[0]] == 1
    assert found.counts["images"] == (3 if less else 4)
    assert "nan" not in json.dumps(found.truth).lower()
    with pytest.raises(ValueError, match=what) as error:
        read(tmp_path, labels, files, "refuse")
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_crowds_and_pictures_without_things_are_no_mistakes(tmp_path, given):
    labels, files = given
    labels["annotations"] = [note for note in labels["annotations"] if note["image_id"] != 2]
    labels["annotations"].append({**labels["annotations"][0], "iscrowd": 1})
    found = read(tmp_path, labels, files, "refuse")
    assert (found.counts["images"], found.counts["crowds"]) == (4, 1)
    assert found.masks(1).shape == (0, 60, 80)
    assert sum(note["iscrowd"] for note in found.truth["annotations"]) == 1
    fewer = read(tmp_path, labels, files, "refuse", empty=False)
    assert (fewer.counts["images"], fewer.counts["images without boxes"]) == (3, 1)


CONTRADICTIONS = {
    "has image_id 99, which": lambda labels: _second(labels["annotations"], image_id=99),
    "has category_id 55, which": lambda labels: _second(labels["annotations"], category_id=55),
    "lists 2 categories with the id 3;": lambda labels: labels["categories"].append({"id": 3, "name": "other"}),
    "lists 2 categories with the name 'box'": lambda labels: labels["categories"].append({"id": 9, "name": "box"}),
    "no list 'categories'": lambda labels: labels.pop("categories"),
    "a row of 'images' has no height": lambda labels: labels["images"][1].pop("height"),
    r"a row of 'images' has id = \[1\]; needs a whole number": lambda labels: labels["images"][1].update(id=[1]),
    "a row of 'categories' has name = None; needs text": lambda labels: labels["categories"][0].update(name=None),
    "a row of 'annotations' has no bbox": lambda labels: labels["annotations"][0].pop("bbox"),
}


@pytest.mark.parametrize("message", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_is_refused(message, tmp_path, given):
    labels, files = given
    CONTRADICTIONS[message](labels)
    with pytest.raises(ValueError, match=message):
        read(tmp_path, labels, files)


def test_run_lengths_decode_as_in_pycocotools():
    from pycocotools import mask

    chance = np.random.default_rng(0)
    for share in (0.0, 0.02, 0.5, 1.0):
        solid = chance.random((23, 40)) < share
        solid[3:20, 1:5] |= share > 0
        text = mask.encode(np.asfortranarray(solid.astype(np.uint8)))["counts"].decode()
        ends = np.flatnonzero(np.diff(solid.T.flatten(), prepend=False, append=not solid.T.flatten()[-1]))
        assert decode_counts(text) == np.diff(ends, prepend=0).tolist()
        assert drawable({"size": [23, 40], "counts": text}, 23, 40)
        assert not drawable({"size": [23, 40], "counts": text[:-1]}, 23, 40)
    assert decode_counts("3 ") is None


def test_damaged_annotations_do_not_break_scoring(tmp_path, given):
    """pycocotools raises an error, or ends the process, on outlines that are missing or wrong."""
    labels, files = given
    first = labels["annotations"][0]
    labels["annotations"] += [
        {**first, "segmentation": [[1.0, 2.0, 3.0]]},
        {**first, "segmentation": [[0, 0, 1e12, 0, 1e12, 1e12]]},
        {**first, "segmentation": {"size": [60, 80], "counts": "abc"}},
        {key: first[key] for key in first if key not in ("segmentation", "area")}
        | {"iscrowd": 1, "bbox": [5, 5, 1e300, 9]},
    ]
    found = read(tmp_path, labels, files)
    assert (found.counts["outlines that cannot be drawn"], found.counts["crowds"]) == (3, 1)
    answers = [
        {"image_id": note["image_id"], "category_id": note["category_id"], "bbox": note["bbox"], "score": 1.0,
         "segmentation": run_lengths(note["segmentation"], *size)}
        for note in found.truth["annotations"] if not note["iscrowd"]
        for size in [next((p["height"], p["width"]) for p in labels["images"] if p["id"] == note["image_id"])]
    ]  # fmt: skip
    scores = average_precision(found.truth, answers, masks=True)
    assert (scores["box_ap"], scores["mask_ap"]) == (pytest.approx(100), pytest.approx(100))


def test_a_truncated_file_and_an_empty_one(tmp_path, given):
    labels, files = given
    scene_files.write(tmp_path, labels, files, "train")
    (tmp_path / "train.json").write_bytes((tmp_path / "train.json").read_bytes()[:-40])
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        read_scenes(tmp_path / "train.json", ImageFiles(tmp_path / "images"))
    (tmp_path / "damaged.json.xz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"damaged.json.xz cannot be read as JSON"):
        read_scenes(tmp_path / "damaged.json.xz", ImageFiles(tmp_path / "images"))
    with pytest.raises(ValueError, match="has no usable image; left out: 4 missing images"):
        read(tmp_path / "none", labels, {})


@pytest.mark.parametrize("kind", ["BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"])
def test_images_cut_short_are_found_in_every_format(tmp_path, kind):
    from PIL import Image

    Image.effect_noise((32, 32), 50).save(tmp_path / "a", kind)
    assert image_size(ImageFiles(tmp_path), "a") == (32, 32)
    whole = (tmp_path / "a").read_bytes()
    (tmp_path / "a").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Broken, match="a cannot be read"):
        image_size(ImageFiles(tmp_path), "a")


def test_grey_images_become_rgb_and_other_files_raise(tmp_path):
    from PIL import Image

    Image.new("L", (5, 4), 9).save(tmp_path / "grey.png")
    (tmp_path / "text.png").write_text("no picture")
    files = ImageFiles(tmp_path)
    assert read_image(files, "grey.png").tolist() == torch.full((3, 4, 5), 9).tolist()
    with pytest.raises(ValueError, match=r"text.png cannot be read: it is not an image of a known format"):
        read_image(files, "text.png")
    with pytest.raises(ValueError, match="it is missing"):
        read_image(files, "other.png")
    sizes = (124, 0x1007, 4, 4, 0, 0, 0, 32, 4)
    (tmp_path / "new.dds").write_bytes(b"DDS " + struct.pack("<7I44x2I4s40x", *sizes, b"ABCD"))
    with pytest.raises(ValueError, match=r"new\.dds cannot be read: Unimplemented pixel format"):
        read_image(files, "new.dds")
    with pytest.raises(ValueError, match="no folder and no tar archive"):
        ImageFiles(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="not a tar archive"):
        ImageFiles(tmp_path / "text.png")


def test_data_sets_are_found_or_missing_files_are_named(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMKIT_DATA", raising=False)
    with pytest.raises(ValueError, match="NORMKIT_DATA is not set"):
        find_scenes("coco")
    with pytest.raises(ValueError, match=r"no data set named 'cocoa' \(did you mean 'coco'\?\); there are coco, "):
        find_scenes("cocoa")
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    (tmp_path / "coco" / "train2017").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"lacks annotations/instances_train2017\.json, annotations/"):
        find_scenes("coco")
    scene_files.write(tmp_path / "own", *scene_files.scenes(2), "train")
    with pytest.raises(ValueError, match=r"lacks valid\.json"):
        find_scenes(str(tmp_path / "own"))


def test_a_partial_data_set_has_a_remark(tmp_path, monkeypatch, capsys):
    """Pictures are counted: what is not all of a data set does not carry its name alone."""
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    labels, files = scene_files.scenes(3)
    scene_files.write(tmp_path / "pennfudan_320", labels, files, "train", packed=True)
    scene_files.write(tmp_path / "pennfudan_320", labels, files, "val", packed=True)
    data = find_scenes("pennfudan_320")()
    assert data.name == "pennfudan_320 (3 of 120 training images, 3 of 50 test images)"
    assert data.vocabularies["classes"].plain() == ["box", "bar"]
    with pytest.raises(ValueError, match="has 3 images, pennfudan_320 has 120"):
        find_scenes("pennfudan_320", "refuse")()
    assert list(SCENE_SETS) == ["coco", "coco128_320", "pennfudan_320"]
    main(["list"])
    listed = capsys.readouterr().out
    assert re.search(r"pennfudan_320 +here$", listed, re.MULTILINE)
    assert re.search(r"coco128_320 +not here; the first 128 images", listed)


@pytest.mark.shared
@pytest.mark.parametrize(("name", "boxes"), [("coco128_320", 929), ("pennfudan_320", 286)])
def test_the_small_sets_have_no_invalid_annotations(name, boxes, monkeypatch):
    monkeypatch.setenv("NORMKIT_DATA", str(SHARED))
    data = find_scenes(name, "refuse")()
    assert data.train.counts["boxes"] == boxes
    assert data.train.image(0).shape[0] == 3
