"""Images with classes: CIFAR, ImageNet, and folders of your own.

The library datasets finds the splits of a folder in one of three formats, writes a table of them into the cache
(`NORMKIT_CACHE`) once and maps that into memory:

| format | training split | test split |
|---|---|---|
| a file per image | train/CLASS/*.JPEG | val/CLASS/*.JPEG |
| Parquet | *train*.parquet: columns image and label | *val*.parquet |
| WebDataset | *train*.tar: KEY.jpg beside KEY.cls or KEY.json | *val*.tar |

If there is a split "test" beside "val", "val" is the validation split; unless the classes of "test" are negative, as in
ImageNet's, where they are secret.
"""

import contextlib
import copy
import dataclasses
import io
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normkit._util import cache_folder
from normkit_papers.data import Data, OnStage
from normkit_papers.data.batches import batches_of
from normkit_papers.data.files import find, table, undamaged
from normkit_papers.data.vocab import Vocab

LABELS = ("label", "fine_label", "cls", "json")  # names of columns with classes
Splits = dict[str, "ImageSplit"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """A row of the table of images; `corpora.toml` explains its keys."""

    name: str
    folders: Sequence[str] = ()
    train: int
    test: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    origin: str


IMAGE_SETS: dict[str, ImageSet] = {name: ImageSet(**row) for name, row in table("images").items()}
"""By name."""


class ImageSplit:
    """Images and their classes `[n]`; an image is decoded when it is used.

    `items` has for each image its pixels `[height, width, 3]`, or a dict with its "bytes" or, if None, its "path".

    >>> decode(ImageSplit(np.zeros((2, 4, 6, 3), np.uint8), np.array([0, 1])), 1).size
    (6, 4)
    """

    def __init__(self, items: Any, labels: np.ndarray, origin: str = "the array"):
        if len(items) != len(labels):
            raise ValueError(f"{origin} has {len(items):,} images and {len(labels):,} labels; needs as many")
        self.items, self.labels, self.origin = items, np.asarray(labels, np.int64), origin
        self.rows = np.arange(len(labels))

    def take(self, chosen: np.ndarray) -> "ImageSplit":
        """Return some of the images."""
        part = copy.copy(self)
        part.rows, part.labels = self.rows[chosen], self.labels[chosen]
        return part

    def __getitem__(self, item: int) -> Any:
        return self.items[int(self.rows[item])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageData(Data):
    """A data set of images, an `ImageSplit` per split; its name has deviations from the table."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


def find_images(name: str) -> tuple[ImageSet | None, Path]:
    """Return the row (None for a folder of your own) and the folder of a data set.

    Raises:
        ValueError: If the name is unknown or the folder is missing; the message names the source.
    """
    return find(name, IMAGE_SETS, "image data set", lambda row, folder: [])


def read_images(name: str, *, held_out: int = 0, on_stage: OnStage = lambda stage: None) -> ImageData:
    """List the images of a data set and their classes; files are decoded when they are used.

    `held_out` training images, always the same, make the validation split; 0 uses the data set's own, or else the test
    split.

    Raises:
        ValueError: If the data set is missing or damaged.
    """
    row, folder = find_images(name)
    on_stage(f"reading {folder.name}")
    splits, classes = _read_packed(folder) if (folder / "test_batch.grad.xz").is_file() else _read_folder(folder)
    for split, part in splits.items():
        if not len(part.labels) or part.labels.min() < 0 or part.labels.max() >= len(classes):
            raise ValueError(f"the {split} split of {folder} needs images with classes from 0 to {len(classes) - 1}")
    train, test = splits["train"], splits["test"]
    valid = splits.get("valid", test)
    label = folder.name
    if row is not None:
        counts = ((len(train.labels), row.train, "training"), (len(test.labels), row.test, "test"))
        remarks = [f"{found:,} of {count:,} {what} images" for found, count, what in counts if found != count]
        label = f"{row.name} ({', '.join(remarks)})" if remarks else row.name
    if held_out:
        if held_out >= (count := len(train.labels)):
            raise ValueError(f"--images.held-out must be below the {count:,} training images; it is {held_out}")
        order = np.random.default_rng(0).permutation(count)
        valid, train = train.take(np.sort(order[:held_out])), train.take(np.sort(order[held_out:]))
    known = row or IMAGE_SETS["imagenet"]
    return ImageData(
        name=label, train=train, valid=valid, test=test, vocabularies={"classes": Vocab(classes)},
        mean=known.mean, std=known.std,
    )  # fmt: skip


def decode(split: ImageSplit, item: int, least: int = 0) -> Any:
    """Decode an image to PIL in RGB; ValueError if it cannot be read.

    With `least`, a JPEG is decoded at a half, a fourth or an eighth of its size if both sides keep `least` pixels,
    which is faster.
    """
    from PIL import Image

    found = split[item]
    if isinstance(found, np.ndarray):
        return Image.fromarray(found)
    path, content = found["path"], found["bytes"]
    name = path if content is None else f"image {split.rows[item]} of {split.origin}"
    with reading(name), Image.open(path if content is None else io.BytesIO(content)) as file:
        if least:
            file.draft(None, (least, least))
        return to_rgb(file)


def to_rgb(image: Any) -> Any:
    """Convert an image of PIL to RGB; ValueError if PIL would clip its pixels to white."""
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}); scale them to 8 bits")
    return image.convert("RGB")


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise a ValueError if the image of this name cannot be read in the block."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:  # its message has a memory address
        raise ValueError(f"{name} cannot be read: it is not an image of a known format") from None
    except (OSError, TypeError, ValueError, SyntaxError, NotImplementedError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read: {error}") from None


def image_batches(split: ImageSplit, size: int, *, seed: int = 0, epoch: int = 0) -> list[np.ndarray]:
    """Return the images of each batch of an epoch; the order depends on seed and epoch only.

    An incomplete last batch is left out.

    Raises:
        ValueError: If there are fewer than `size` images.

    >>> [len(batch) for batch in image_batches(ImageSplit(np.zeros((5, 1, 1, 3), np.uint8), np.zeros(5)), 2)]
    [2, 2]
    """
    count = len(split.labels)
    if count < size:
        raise ValueError(f"a batch of {size} images needs as many to train on; there are {count}")
    return batches_of(np.ones(count, int), size, bucketing=False, seed=seed, epoch=epoch)[: count // size]


def _read_packed(folder: Path) -> tuple[Splits, list[str]]:
    """Read CIFAR-10 packed as differences: FILE.grad.xz, and labels as .npy."""
    splits = {}
    for split, parts in {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}.items():
        with undamaged(path := folder / f"{split}_labels.npy"):
            labels = np.load(path)
        splits[split] = ImageSplit(
            np.concatenate([_unpacked(folder / f"{part}.grad.xz") for part in parts]), labels, str(folder)
        )
    return splits, (folder / "label_names.txt").read_text(encoding="utf8").split()


def _unpacked(path: Path) -> np.ndarray:
    """Read images `[n, 32, 32, 3]` from 2-D differences of planes G, R - G, B - G, modulo 256."""
    with undamaged(path), lzma.open(path) as file:
        planes = np.frombuffer(file.read(), np.uint8).reshape(3, -1, 32, 32)
    planes = planes.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[1:] += planes[0]
    return np.ascontiguousarray(planes[[1, 0, 2]].transpose(1, 2, 3, 0))


def _read_folder(folder: Path) -> tuple[Splits, list[str]]:
    """Return the splits of a folder and the names of the classes."""
    import datasets

    datasets.disable_progress_bars()
    for path in [*folder.glob("*.tar"), *folder.glob("*/*.tar")]:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 512))
            if any(file.read()):  # an archive ends with zeros; tarfile ignores that they are missing
                raise ValueError(f"{path} cannot be read: it is cut short; get it again")
    try:
        found: Any = datasets.load_dataset(str(folder), cache_dir=str(cache_folder() / "datasets"))
    except Exception as error:  # datasets raises errors of many kinds, and its own name no file
        raise ValueError(f"the images in {folder} cannot be read: {error.__cause__ or error}") from None
    splits = {split.replace("validation", "valid"): _table_split(rows, folder) for split, rows in found.items()}
    if "test" in splits and "valid" in splits and (splits["test"].labels < 0).all():
        del splits["test"]
    if "test" not in splits and "valid" in splits:
        splits["test"] = splits.pop("valid")
    if missing := [split for split in ("train", "test") if split not in splits]:
        raise ValueError(
            f"{folder} lacks a {' and a '.join(missing)} split; needs train/CLASS/*.JPEG and val/CLASS/*.JPEG, or "
            "*train*.tar and *val*.tar, or *.parquet"
        )
    most = 1 + max(int(part.labels.max(initial=0)) for part in splits.values())
    if most > 100_000:  # such as 2**32 - 1 for "none"
        raise ValueError(f"{folder} has a class {most - 1:,}; classes are numbered from 0")
    if found["train"].builder_name != "imagefolder":
        return splits, [str(number) for number in range(most)]
    classes = found["train"].features["label"].names
    if unseen := {*range(len(classes))} - {*splits["train"].labels.tolist()}:
        raise ValueError(f"{folder} has no training image of class {classes[min(unseen)]}; needs all classes in train")
    return splits, classes


def _table_split(rows: Any, folder: Path) -> ImageSplit:
    """Return the images and classes of a table of the library datasets."""
    import datasets

    where = f"split {rows.split} of {folder}"
    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image) or name == "image"]
    labels = [name for name in LABELS if name in rows.features]
    if not images or not labels:
        raise ValueError(f"{where} has columns {', '.join(rows.features)}; needs an image, and {' or '.join(LABELS)}")
    found = [row.get("label") if isinstance(row, dict) else row for row in rows[labels[0]][:]]
    if not all(isinstance(label, int) for label in found):
        raise ValueError(f"{where} has an image without a class; needs a whole number each")
    rows = rows.cast_column(images[0], datasets.Image(decode=False))
    return ImageSplit(rows[images[0]], np.array(found), where)
