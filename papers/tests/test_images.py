"""Images with classes in every format, and images with boxes in COCO's."""

import copy
import hashlib
import pathlib

import image_files as made
import numpy as np
import pytest
import scene_files
import torch
from normkit_papers.data.images import (
    _unpacked,
    decode,
    find_images,
    read_images,
)
from normkit_papers.data.scenes import ImageFiles, find_scenes, read_scenes
from PIL import Image

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))


def contents(split):
    """Pixels and class of every image."""
    images = (np.asarray(decode(split, item)).tobytes() for item in range(len(split.labels)))
    return sorted(zip(images, split.labels.tolist(), strict=True))


# -- images with classes ----------------------------------------------------------------------------------------------


def test_cifar_100_has_its_fine_classes(tmp_path):
    for split, count in (("train", 12), ("test", 6)):
        rows = made.files(count)
        made.write_parquet(tmp_path / "cifar100" / "cifar100" / f"{split}-0.parquet", rows, "img", "fine_label")
    data = read_images("cifar100")
    assert data.train.labels.tolist() == [label for *_, label in made.files(12)]
    assert data.name == "cifar100 (12 of 50,000 training images, 6 of 10,000 test images)"


def test_cifar_packed_as_differences(tmp_path):
    pixels, labels = made.pixels(10, 10)
    (folder := tmp_path / "cifar10").mkdir()
    for batch in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        made.pack(folder / f"{batch}.grad.xz", pixels)
    np.save(folder / "train_labels.npy", np.tile(labels, 5).astype(np.uint8))
    np.save(folder / "test_labels.npy", labels.astype(np.uint8))
    (folder / "label_names.txt").write_text("\n".join("abcdefghij"))
    data = read_images("cifar10")
    assert np.array_equal([np.asarray(decode(data.train, n)) for n in range(50)], np.tile(pixels, (5, 1, 1, 1)))
    assert data.test.labels.tolist() == labels.tolist()
    for wrong in (labels[:9], np.array([*[5] * 9, 10]), np.array([object()] * 10)):  # the last is a pickle
        np.save(folder / "test_labels.npy", wrong, allow_pickle=True)
        with pytest.raises(ValueError, match="cifar10"):
            read_images("cifar10")
    (folder / "data_batch_2.grad.xz").write_bytes(b"0" * 5000)
    with pytest.raises(ValueError, match=r"data_batch_2\.grad\.xz cannot be read"):
        read_images("cifar10")


def test_all_formats_have_the_same_images(tmp_path):
    train, val = made.files(24, 0), made.files(9, 1)
    folder = made.write_folder(tmp_path / "a")
    (folder / "train" / "class0" / "._0000.png").write_bytes(b"of macOS")
    for name, kind in (("b", "cls"), ("d", "json")):
        made.write_tar(tmp_path / name / "x-train-00.tar", train[:10], kind)
        made.write_tar(tmp_path / name / "x-train-01.tar", train[10:], kind)
        made.write_tar(tmp_path / name / "x-validation-00.tar", val, kind)
    made.write_parquet(tmp_path / "c" / "data" / "train-00.parquet", train[:13])
    made.write_parquet(tmp_path / "c" / "data" / "train-01.parquet", train[13:])
    made.write_parquet(tmp_path / "c" / "data" / "validation-00.parquet", val)
    data = [read_images(str(tmp_path / name)) for name in "abcd"]
    assert data[0].vocabularies["classes"].plain() == ["class0", "class1", "class2"]
    assert [len(each.vocabularies["classes"].plain()) for each in data] == [3] * 4
    assert len(contents(data[0].train)) == 24
    assert [contents(each.train) == contents(data[0].train) for each in data] == [True] * 4
    assert [contents(each.test) == contents(data[0].test) for each in data] == [True] * 4
    assert data[0].valid is data[0].test


def test_a_test_split_without_classes_is_not_scored(tmp_path):
    for split, count in (("train", 9), ("validation", 6), ("test", 5)):
        samples = made.files(count)
        samples = [(key, content, -1) for key, content, _ in samples] if split == "test" else samples
        made.write_parquet(tmp_path / "own" / f"{split}-0.parquet", samples)
    data = read_images(str(tmp_path / "own"))
    assert (len(data.test.labels), len(data.valid.labels)) == (6, 6)
    made.write_parquet(tmp_path / "own" / "test-0.parquet", [(*made.files(1)[0][:2], 2)] * 5)
    data = read_images(str(tmp_path / "own"))
    assert (len(data.test.labels), len(data.valid.labels)) == (5, 6)


@pytest.mark.parametrize("label", [-1, 2**32 - 1, None, "dog"])
def test_labels_that_are_no_classes_raise(label, tmp_path):
    made.write_parquet(tmp_path / "own" / "train-0.parquet", [*made.files(3)[:2], ("x", made.files(1)[0][1], label)]
                       if label != "dog" else [(key, content, "dog") for key, content, _ in made.files(3)])  # fmt: skip
    made.write_parquet(tmp_path / "own" / "val-0.parquet", made.files(3))
    with pytest.raises(ValueError, match=r"own"):
        read_images(str(tmp_path / "own"))


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_damaged_shards_raise(kind, tmp_path):
    write = made.write_tar if kind == "tar" else made.write_parquet
    for split in ("train", "val"):
        path = write(tmp_path / "own" / f"{split}.{kind}", made.files(20))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"own.* cannot be read"):
        read_images(str(tmp_path / "own"))


def test_missing_images_are_named_with_their_source(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"ILSVRC2012.*image-net\.org"):
        find_images("imagenet")
    with pytest.raises(ValueError, match="'cifar10'"):
        find_images("cifar_10")
    (tmp_path / "own" / "train" / "a").mkdir(parents=True)
    with pytest.raises(ValueError, match="own"):
        read_images(str(tmp_path / "own"))
    made.write_folder(tmp_path / "own2")
    (tmp_path / "own2" / "val" / "class2").rename(tmp_path / "own2" / "val" / "zebra")
    with pytest.raises(ValueError, match=r"own2 .* zebra"):
        read_images(str(tmp_path / "own2"))
    monkeypatch.delenv("NORMKIT_DATA")
    with pytest.raises(ValueError, match=r"NORMKIT_DATA .*uoft-cs"):
        find_images("cifar10")


def test_unreadable_images_are_named(tmp_path):
    data = read_images(str(made.write_folder(tmp_path / "own")))
    path = pathlib.Path(data.train[3]["path"])
    wide = tmp_path / "wide.tif"
    Image.fromarray(np.full((4, 5), 700, np.uint16)).save(wide)  # PIL would clip it at 255
    for content in (path.read_bytes()[:200], b"no image", b"", wide.read_bytes(), None):
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path.name} cannot be read"):
            decode(data.train, 3)
    made.write_parquet(tmp_path / "own2" / "train.parquet", [("a", b"", 0)] * 2)
    made.write_parquet(tmp_path / "own2" / "val.parquet", made.files(2))
    with pytest.raises(ValueError, match=r"image 1 of split train .*own2 cannot be read"):
        decode(read_images(str(tmp_path / "own2")).train, 1)


def test_held_out_images_are_fixed_and_not_trained_on(tmp_path):
    folder = str(made.write_folder(tmp_path / "own"))
    one, two, whole = read_images(folder, held_out=6), read_images(folder, held_out=6), read_images(folder)
    assert (len(one.train.labels), len(one.valid.labels)) == (18, 6)
    assert contents(one.valid) == contents(two.valid)
    assert sorted(contents(one.valid) + contents(one.train)) == contents(whole.train)
    with pytest.raises(ValueError, match=r"held.out"):
        read_images(folder, held_out=24)


@pytest.mark.shared
def test_the_shared_cifar_10_is_the_canonical_one():
    pixels = _unpacked(SHARED / "cifar10" / "test_batch.grad.xz")
    assert hashlib.md5(pixels.tobytes()).hexdigest() == "6d2714505047e13831cd876923568712"


# -- images with boxes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def given():
    return scene_files.scenes(4)


def read(folder, labels, files, **how):
    scene_files.write(folder, labels, files, "train")
    return read_scenes(folder / "train.json", ImageFiles(folder / "images"), **how)


def test_scenes_have_the_boxes_classes_and_masks_of_their_file(tmp_path, given):
    found = read(tmp_path / "plain", *given)
    labels = given[0]["annotations"]
    assert found.counts == {"images": 4, "boxes": len(labels)}
    assert found.categories == {3: "box", 7: "bar"}
    for at, scene in enumerate(found.scenes):
        own = [row for row in labels if row["image_id"] == at + 1]
        corners = [[x, y, x + w, y + h] for x, y, w, h in (row["bbox"] for row in own)]
        assert scene.boxes.tolist() == corners
        assert scene.labels.tolist() == [{3: 1, 7: 2}[row["category_id"]] for row in own]
        assert found.image(at).shape == (3, scene.height, scene.width)
        for mask, (left, top, right, bottom) in zip(masks(found, at), corners, strict=True):
            expected = torch.zeros_like(mask)
            expected[top:bottom, left:right] = 1
            assert torch.equal(mask, expected)
    scene_files.write(tmp_path / "packed", *given, "train", packed=True)
    packed = read_scenes(tmp_path / "packed" / "train.json.xz", ImageFiles(tmp_path / "packed" / "images.tar"))
    assert all(map(torch.equal, *(each.objects(1, masks=True).values() for each in (packed, found))))
    assert all(torch.equal(packed.image(n), found.image(n)) for n in range(4))


def masks(scenes, at):
    return scenes.objects(at, masks=True)["masks"]


def changed(**changes):
    """Add a copy of the first annotation with changes."""
    return lambda labels, files: labels["annotations"].append({**labels["annotations"][0], **changes})


@pytest.mark.parametrize("box", [[5, 5, 0, 3], [500, 5, 9, 3], [1, 2, float("nan"), 3]])
def test_boxes_without_area_are_counted(box, tmp_path, given):
    labels, files = copy.deepcopy(given)
    boxes = len(labels["annotations"])
    changed(bbox=box)(labels, files)
    found = read(tmp_path, labels, files)
    assert found.counts == {"images": 4, "boxes": boxes, "boxes without area in their image": 1}


def test_run_lengths_are_the_mask_they_encode(tmp_path, given):
    from pycocotools import mask

    labels, files = copy.deepcopy(given)
    plain = read(tmp_path, labels, files)
    row, scene = labels["annotations"][0], plain.scenes[0]
    flat = masks(plain, 0)[0].T.flatten().numpy()  # down the columns
    ends = [0, *(np.flatnonzero(np.diff(flat)) + 1).tolist(), len(flat)]
    counts = np.diff(ends).tolist()
    size = [scene.height, scene.width]
    text = mask.encode(np.asfortranarray(masks(plain, 0)[0].numpy()))["counts"].decode()
    for outline in ({"size": size, "counts": counts}, {"size": size, "counts": text}):
        row["segmentation"] = outline
        assert torch.equal(masks(read(tmp_path, labels, files), 0), masks(plain, 0))


def test_crowds_and_images_without_objects_are_no_mistakes(tmp_path, given):
    labels, files = copy.deepcopy(given)
    labels["annotations"] = [row for row in labels["annotations"] if row["image_id"] != 2]
    crowd = {**labels["annotations"][0], "iscrowd": 1, "bbox": [-3, 5, 500, 9]}
    labels["annotations"].append(crowd)
    found = read(tmp_path, labels, files)
    assert (found.counts["images"], found.counts["crowds"]) == (4, 1)
    assert masks(found, 1).shape == (0, 60, 80)
    (crowded,) = (at for at, scene in enumerate(found.scenes) if scene.crowds.any())
    objects = found.objects(crowded, masks=True)
    assert objects["iscrowd"].tolist() == [*[0] * (len(objects["labels"]) - 1), 1]
    assert objects["boxes"][-1].tolist() == [0, 5, found.scenes[crowded].width, 14], "inside the image"
    fewer = read(tmp_path, labels, files, empty=False)
    assert (fewer.counts["images"], fewer.counts["images without boxes"]) == (3, 1)


CONTRADICTIONS = [
    changed(image_id=99),
    changed(category_id=55),
    changed(segmentation=[[1.0, 2.0]]),
    changed(segmentation={"size": [8, 8], "counts": [64]}),
    lambda labels, files: labels["categories"].append({"id": 3, "name": "other"}),
    lambda labels, files: files.pop("003.png"),
    lambda labels, files: labels["images"].append(labels["images"][0]),
    lambda labels, files: labels.pop("categories"),
    lambda labels, files: labels["images"][1].pop("height"),
    lambda labels, files: labels["annotations"][0].pop("bbox"),
]


@pytest.mark.parametrize("contradict", CONTRADICTIONS)
def test_a_file_that_contradicts_itself_raises(contradict, tmp_path, given):
    labels, files = copy.deepcopy(given)
    contradict(labels, files)
    with pytest.raises(ValueError, match=r"train\.json cannot be read"):
        read(tmp_path, labels, files)


def test_missing_and_damaged_files_of_scenes_are_named(tmp_path, given, monkeypatch):
    labels, files = copy.deepcopy(given)
    files["001.png"] = files["001.png"][:300]
    labels["images"][1]["width"] += 1
    found = read(tmp_path / "a", labels, files)
    for at, name in enumerate(("001.png", "002.png")):  # damaged; of another size than listed
        with pytest.raises(ValueError, match=name):
            found.image(at)
    path = tmp_path / "a" / "train.json"
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"train\.json cannot be read"):
        read_scenes(path, ImageFiles(tmp_path / "a" / "images"))
    (tmp_path / "images.tar").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"images\.tar cannot be read"):
        ImageFiles(tmp_path / "images.tar")
    with pytest.raises(ValueError, match=r"lacks valid\.json"):
        find_scenes(str(tmp_path / "a"))
    with pytest.raises(ValueError, match=r"coco.*cocodataset\.org"):
        find_scenes("coco")


def test_a_partial_data_set_has_a_remark(tmp_path):
    for name in ("train", "val"):
        scene_files.write(tmp_path / "pennfudan_320", *scene_files.scenes(3), name, packed=True)
    data = find_scenes("pennfudan_320")()
    assert data.name == "pennfudan_320 (3 of 120 training images, 3 of 50 test images)"
    assert data.vocabularies["classes"].plain() == ["box", "bar"]


@pytest.mark.shared
@pytest.mark.parametrize(("name", "boxes"), [("coco128_320", 929), ("pennfudan_320", 286)])
def test_the_small_sets_have_no_unusable_annotations(name, boxes, monkeypatch):
    monkeypatch.setenv("NORMKIT_DATA", str(SHARED))
    data = find_scenes(name)()
    assert {*data.train.counts, *data.test.counts} <= {"images", "boxes", "crowds", "images without boxes"}
    assert data.train.counts["boxes"] == boxes
    assert data.train.image(0).shape[0] == 3
    assert masks(data.train, 0).shape[0] == len(data.train.scenes[0].labels)
