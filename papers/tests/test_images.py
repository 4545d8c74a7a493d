"""Readers of pictures in every form, what is wrong with them.

The order of images is tested, too.
"""

import dataclasses
import hashlib
import io
import itertools
import os
import pathlib
import tarfile

import image_files as made
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from normkit_papers.data.cifar import BATCHES, _decompress, read_cifar
from normkit_papers.data.image_files import Broken, ImageFiles, read_image
from normkit_papers.data.image_folder import ClassFolders, ImageArray, decode, image_batches
from normkit_papers.data.image_sets import find_images
from normkit_papers.data.images import read_images
from normkit_papers.data.shards import Rows, Tars
from normkit_papers.tasks import takers
from normkit_papers.train.config import Images, Run
from PIL import Image

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data" / "cifar10"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path / "cache"))


def test_cifar_in_its_binary_version(tmp_path):
    train, test, names = read_cifar(made.write_cifar(tmp_path, train=40, test=20), 10)
    pixels, labels = zip(*(made.pixels(8, 10, seed=n) for n in range(1, 6)), strict=True)
    np.testing.assert_array_equal(train.pixels, np.concatenate(pixels))
    np.testing.assert_array_equal(train.labels, np.concatenate(labels))
    np.testing.assert_array_equal(test.pixels, made.pixels(20, 10, seed=9)[0])
    assert names[3] == "class3"


def test_cifar_100_has_the_fine_classes(tmp_path):
    train, _, names = read_cifar(made.write_cifar(tmp_path, 100, train=120, test=10), 100)
    np.testing.assert_array_equal(train.labels, np.arange(120) % 100)
    np.testing.assert_array_equal(train.pixels, made.pixels(120, 100, seed=1)[0])
    assert len(names) == 100


def test_cifar_as_differences(tmp_path):
    pixels, labels = made.pixels(10, 10)
    for batch in (*BATCHES, "test_batch"):
        made.pack(tmp_path / f"{batch}.grad.xz", pixels)
    np.save(tmp_path / "train_labels.npy", np.tile(labels, 5).astype(np.uint8))
    np.save(tmp_path / "test_labels.npy", labels.astype(np.uint8))
    (tmp_path / "label_names.txt").write_text("\n".join("abcdefghij"))
    train, test, _ = read_cifar(tmp_path, 10)
    np.testing.assert_array_equal(train.pixels, np.tile(pixels, (5, 1, 1, 1)))
    np.testing.assert_array_equal(test.labels, labels)
    np.save(tmp_path / "test_labels.npy", labels[:9])
    with pytest.raises(ValueError, match="10 images and 9 labels"):
        read_cifar(tmp_path, 10)
    np.save(tmp_path / "test_labels.npy", np.array([*[5] * 9, -1]))
    with pytest.raises(ValueError, match="has a class -1; needs classes from 0 to 9"):
        read_cifar(tmp_path, 10)
    for wrong in (np.full(10, 1.9), np.full((10, 1), 1), np.full(10, "a")):
        np.save(tmp_path / "test_labels.npy", wrong)
        with pytest.raises(ValueError, match=r"test_labels.npy is not an array of labels: it needs one whole number"):
            read_cifar(tmp_path, 10)


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="no ../shared/data/cifar10")
def test_the_shared_cifar_10_is_the_canonical_one():
    pixels = _decompress(SHARED / "test_batch.grad.xz")
    assert hashlib.md5(pixels.tobytes()).hexdigest() == "6d2714505047e13831cd876923568712"


def test_cifar_that_is_not_whole(tmp_path):
    made.write_cifar(tmp_path)
    (tmp_path / "data_batch_2.bin").write_bytes(b"0" * 5000)
    with pytest.raises(ValueError, match=r"data_batch_2.bin is cut short: 5,000 bytes"):
        read_cifar(tmp_path, 10)
    (tmp_path / "data_batch_2.bin").unlink()
    (tmp_path / "data_batch_2").write_bytes(b"")
    with pytest.raises(ValueError, match=r"lacks data_batch_2\.bin$"):
        read_cifar(tmp_path, 10)
    (tmp_path / "data_batch_1").write_bytes(b"")
    with pytest.raises(ValueError, match="pickles, which are never opened"):
        read_cifar(tmp_path, 10)


def test_a_folder_of_classes(tmp_path):
    album = read_images(str(made.write_folder(tmp_path)))
    assert (len(album.train.labels), len(album.test.labels)) == (24, 9)
    assert album.vocabularies["classes"].plain() == ["class0", "class1", "class2"]
    for item in (0, 10, 23):
        picture = np.asarray(decode(album.train, item)).mean((0, 1))
        assert picture.argmax() == album.train.labels[item], "each class is of its colour"
    assert album.valid is album.test


def contents(split):
    return sorted((split.raw(item), int(split.labels[item])) for item in range(len(split.labels)))


def test_all_forms_hold_the_same_pictures(tmp_path):
    folder = made.write_folder(tmp_path / "a")
    train, val = made.files(24, 0), made.files(9, 1)
    tars = tmp_path / "b"
    made.write_tar(tars / "x-train-00.tar", train[:10])
    made.write_tar(tars / "x-train-01.tar", train[10:], kind="json")
    made.write_tar(tars / "val" / "00.tar", val)
    rows = tmp_path / "c"
    made.write_parquet(rows / "data" / "train-00.parquet", train[:13])
    made.write_parquet(rows / "data" / "train-01.parquet", train[13:])
    made.write_parquet(rows / "data" / "validation-00.parquet", val)
    albums = [read_images(str(path)) for path in (folder, tars, rows)]
    assert [type(album.train) for album in albums] == [ClassFolders, Tars, Rows]
    wanted = sorted((content, label) for _, content, label in train)
    assert [contents(album.train) == wanted for album in albums] == [True] * 3
    assert [contents(album.test) == contents(albums[0].test) for album in albums] == [True] * 3
    assert [len(album.vocabularies["classes"].plain()) for album in albums] == [3] * 3
    assert list(albums[2].train.groups) == [0] * 4 + [1] * 4 + [2] * 4 + [3] + [4] * 4 + [5] * 4 + [6] * 3


def test_folders_of_classes_come_before_archives(tmp_path):
    """ImageNet's own archives, without classes, often stay beside what was unpacked."""
    folder = made.write_folder(tmp_path)
    for split in ("train", "val"):
        made.write_tar(folder / f"ILSVRC2012_img_{split}.tar", made.files(6), kind="txt")
        (folder / split / ".cache").mkdir()
    album = read_images(str(folder))
    assert (len(album.train.labels), len(album.test.labels)) == (24, 9)
    assert album.vocabularies["classes"].plain() == ["class0", "class1", "class2"]


def test_classes_of_archives_are_among_those_of_folders(tmp_path):
    (made.write_folder(tmp_path) / "val").rename(tmp_path / "other")
    made.write_tar(tmp_path / "val.tar", [(key, content, label + 1) for key, content, label in made.files(6)])
    with pytest.raises(
        ValueError, match=r"the test split of .* has a class 3; classes are numbered from 0, and below 3"
    ):
        read_images(str(tmp_path))


def test_a_shard_of_two_splits_raises(tmp_path):
    for split in ("train", "val"):
        made.write_tar(tmp_path / f"contest-{split}.tar", made.files(6))
    with pytest.raises(ValueError, match=r"contest-train.tar has the names of several splits; rename it, or move it"):
        read_images(str(tmp_path))


@pytest.mark.parametrize("name", ["train", "val", "test", "data"])
def test_a_data_set_may_have_the_name_of_a_split(tmp_path, name):
    """A folder `test` was taken for the test split: it scored training images, too."""
    for split, count in (("train", 6), ("val", 3)):
        made.write_tar(tmp_path / name / f"{split}.tar", made.files(count))
    album = read_images(str(tmp_path / name))
    assert [len(split.labels) for split in (album.train, album.valid, album.test)] == [6, 3, 3]


def test_hidden_files_are_no_images(tmp_path):
    (made.write_folder(tmp_path) / "train" / "class0" / "._0000.png").write_bytes(b"of macOS")
    assert len(read_images(str(tmp_path)).train.labels) == 24


def test_json_without_a_label_may_be_beside_a_class(tmp_path):
    path = made.write_tar(tmp_path / "train.tar", made.files(6))
    with tarfile.open(path, "a") as archive:
        for number in range(6):
            member = tarfile.TarInfo(f"{number:04d}.json")
            member.size = len(content := b'{"width": 20}')
            archive.addfile(member, io.BytesIO(content))
    assert Tars([path], []).labels.tolist() == [label for *_, label in made.files(6)]


def test_a_shard_is_listed_once(tmp_path, monkeypatch):
    path = made.write_tar(tmp_path / "train.tar", made.files(6))
    first = Tars([path], [])
    monkeypatch.setattr("normkit_papers.data.shards._scan", lambda path: pytest.fail("listed again"))
    assert contents(Tars([path], [])) == contents(first)


def test_a_shard_that_is_cut_short_is_noted_or_refused(tmp_path):
    made.write_tar(tmp_path / "val.tar", made.files(6))
    path = made.write_tar(tmp_path / "train.tar", made.files(20))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    album = read_images(str(tmp_path))
    assert 5 < len(album.train.labels) < 15
    assert all(decode(album.train, item).size == (20, 20) for item in range(len(album.train.labels)))
    assert "cut short" in album.notes[0]
    assert read_images(str(tmp_path)).notes == album.notes, "also from the list that was kept"
    with pytest.raises(ValueError, match=r"train.tar.*--broken skip"):
        read_images(str(tmp_path), refuse=True)


def test_shards_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match="no image with a class"):
        Tars([made.write_tar(tmp_path / "a.tar", made.files(2), kind="txt")], [])
    with pytest.raises(ValueError, match=r"0000.cls of .* has no class"):
        Tars([made.write_tar(tmp_path / "b.tar", [("0000", made.files(1)[0][1], "dog")])], [])
    with pytest.raises(ValueError, match=r"0000.cls of .* has no class"):
        Tars([made.write_tar(tmp_path / "e.tar", [("0000", made.files(1)[0][1], 2**64)])], [])
    with pytest.raises(ValueError, match=r"0000.json of .* has no class; needs a whole number"):
        Tars([made.write_tar(tmp_path / "g.tar", [("0000", made.files(1)[0][1], 1.7)], kind="json")], [])
    (tmp_path / "c.tar").write_bytes(b"no archive")
    with pytest.raises(ValueError, match=r"c.tar is not a tar archive"):
        Tars([tmp_path / "c.tar"], [])
    paths = pyarrow.table({"image": ["a.png"], "label": [0]})
    pyarrow.parquet.write_table(paths, tmp_path / "f.parquet")
    with pytest.raises(Broken, match=r"row 0 of .*f\.parquet cannot be read: the row has no bytes"):
        decode(Rows([tmp_path / "f.parquet"]), 0)
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"d.parquet is not a Parquet file"):
        Rows([tmp_path / "d.parquet"])


@pytest.mark.parametrize("method", ["schema_arrow", "read", "read_row_group"])
def test_parquet_of_an_unknown_codec_is_named(method, tmp_path, monkeypatch):
    def unknown_codec(*_, **__):
        raise pyarrow.ArrowNotImplementedError("no such codec")

    path = made.write_parquet(tmp_path / "a.parquet", made.files(2))
    kind = property(unknown_codec) if method == "schema_arrow" else unknown_codec
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, method, kind)
    with pytest.raises(ValueError, match=r"a\.parquet .*: no such codec"):
        decode(Rows([path]), 0)


def test_a_test_split_without_classes_is_not_scored(tmp_path):
    """As that of ImageNet in Parquet, whose classes are secret."""
    made.write_parquet(tmp_path / "train-0.parquet", made.files(9))
    made.write_parquet(tmp_path / "validation-0.parquet", made.files(6))
    made.write_parquet(tmp_path / "test-0.parquet", [(key, content, -1) for key, content, _ in made.files(5)])
    stages: list[str] = []
    album = read_images(str(tmp_path), refuse=True, on_stage=stages.append)
    assert len(album.test.labels) == len(album.valid.labels) == 6
    assert stages[0].endswith("has no classes; the validation split is scored")
    made.write_parquet(tmp_path / "test-0.parquet", [("a", b"", -1), ("b", b"", 0)])
    with pytest.raises(ValueError, match=r"the test split of .* has a class -1; classes are numbered from 0"):
        read_images(str(tmp_path))
    made.write_parquet(tmp_path / "test-0.parquet", [("a", b"", 2**32 - 1), ("b", b"", 0)])
    with pytest.raises(ValueError, match=r"has a class 4294967295; classes are numbered from 0, and below 1,000,000"):
        read_images(str(tmp_path))
    for label in ("dog", None):
        made.write_parquet(tmp_path / "test-0.parquet", [("a", b"", label), ("b", b"", label and "cat")])
        with pytest.raises(ValueError, match=r"test-0.parquet has no class in some row"):
            read_images(str(tmp_path))


def test_the_figures_of_a_named_data_set_are_checked(tmp_path, monkeypatch):
    made.write_folder(tmp_path / "imagenet")
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    album = read_images("imagenet")
    assert [note.split(" has ", 1)[1] for note in album.notes] == [
        "3 classes, imagenet has 1,000",
        "24 images in its train split, imagenet has 1,281,167",
        "9 images in its test split, imagenet has 50,000",
    ]
    with pytest.raises(ValueError, match=r"3 classes, imagenet has 1,000; get it from image-net\.org"):
        read_images("imagenet", refuse=True)


def test_missing_data_raises_with_its_source(tmp_path, monkeypatch):
    monkeypatch.delenv("NORMKIT_DATA", raising=False)
    with pytest.raises(ValueError, match=r"NORMKIT_DATA is not set.*cs.toronto.edu"):
        find_images("cifar10")
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"has none of imagenet/, ILSVRC2012/.*image-net.org"):
        find_images("imagenet")
    with pytest.raises(ValueError, match=r"did you mean 'cifar10'"):
        find_images("cifar_10")
    with pytest.raises(ValueError, match=r"lacks train/CLASS/\*.JPEG and val"):
        read_images(str(tmp_path))
    made.write_folder(tmp_path / "mine")
    for path in (tmp_path / "mine" / "val").rglob("*.png"):
        path.rename(tmp_path / "mine" / "val" / path.name)
    for path in (tmp_path / "mine" / "val").glob("class*"):
        path.rmdir()
    with pytest.raises(ValueError, match="val has no folders of classes"):
        read_images(str(tmp_path / "mine"))
    (tmp_path / "mine" / "val" / "zebra").mkdir()
    with pytest.raises(ValueError, match="a class 'zebra' that the training split has not"):
        read_images(str(tmp_path / "mine"))


def test_pictures_that_cannot_be_read_say_where_they_are(tmp_path):
    folder = made.write_folder(tmp_path)
    album = read_images(str(folder))
    path = pathlib.Path(album.train.name(3))
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(Broken, match=rf"{path.name} cannot be read"):
        decode(album.train, 3)
    path.write_text("no picture")
    with pytest.raises(Broken, match=rf"{path.name} cannot be read"):
        decode(album.train, 3)
    path.unlink()
    with pytest.raises(Broken, match=rf"{path.name} cannot be read: .*No such file"):
        decode(album.train, 3)
    if hasattr(os, "mkfifo"):
        os.mkfifo(path)
        with pytest.raises(Broken, match=rf"{path.name} cannot be read: .* is not a regular file"):
            decode(album.train, 3)


@pytest.mark.parametrize("kind", [np.uint16, np.int32, np.float32])
def test_pixels_of_more_than_8_bits_raise(kind, tmp_path):
    """PIL would clip them at 255, so that nearly all of an image is white."""
    Image.fromarray(np.full((4, 5), 700, kind)).save(tmp_path / "wide.tif")
    with pytest.raises(Broken, match=r"wide\.tif cannot be read: its pixels have more than 8 bits \(mode .*\); scale"):
        decode(ClassFolders(tmp_path.parent, [tmp_path.name]), 0)
    with pytest.raises(ValueError, match=r"wide\.tif cannot be read: its pixels have more than 8 bits"):
        read_image(ImageFiles(tmp_path), "wide.tif")


def test_held_out_images_are_fixed_and_not_trained_on(tmp_path):
    folder = str(made.write_folder(tmp_path))
    one, two = read_images(folder, held_out=6), read_images(folder, held_out=6)
    whole = read_images(folder).train
    assert (len(one.train.labels), len(one.valid.labels)) == (18, 6)
    assert contents(one.valid) == contents(two.valid)
    assert sorted(contents(one.valid) + contents(one.train)) == contents(whole)
    with pytest.raises(ValueError, match=r"below the 24 training images; got 24"):
        read_images(folder, held_out=24)


def test_epoch_draws_each_image_once_in_new_order():
    split = ImageArray(np.zeros((12, 1, 1, 3), np.uint8), np.zeros(12))
    epochs = [image_batches(split, 4, seed=1, epoch=epoch) for epoch in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    for batches in epochs:
        assert sorted(itertools.chain(*batches)) == list(range(12))
    with pytest.raises(ValueError, match=r"a batch of 13 images .* there are 12"):
        image_batches(split, 13)


def test_pictures_of_a_group_stay_near_each_other():
    split = ImageArray(np.zeros((400, 1, 1, 3), np.uint8), np.zeros(400))
    split.groups = np.arange(400) // 5  # 80 groups
    batches = image_batches(split, 8, seed=0)
    assert sorted(itertools.chain(*batches)) == list(range(400))
    windows = [{split.groups[item] for batch in batches[at : at + 10] for item in batch} for at in range(0, 50, 10)]
    assert [len(groups) for groups in windows] == [16] * 5, "ten batches are sixteen groups"
    assert len({split.groups[item] for item in batches[0]}) > 4, "and are mixed among each other"


def test_settings_of_images_are_refused_for_other_tasks():
    for field in dataclasses.fields(Images):
        assert takers()[f"images.{field.name}"] == ["images"]
    with pytest.raises(ValueError, match=r"images\.flip .*left out for task digits; it applies to images"):
        Run(name="x", task="digits", data="digits", steps=1, images=Images(flip=0.1))
