"""Images with classes, in memory or in files; an image is decoded when it is used."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from normkit._util import open_regular
from normkit_papers.data.image_files import reading, to_rgb

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
WINDOW = 16  # groups of a file whose images are shuffled together


class Split(Protocol):
    """Images and classes; images of one of the `groups` (None: no groups) are read together."""

    @property
    def labels(self) -> np.ndarray:
        """Class of each image `[n]`."""
        ...

    @property
    def groups(self) -> np.ndarray | None:
        """Group of each image `[n]`, in order."""
        ...

    def name(self, item: int) -> str:
        """Return the name of an image for error messages."""
        ...

    def raw(self, item: int) -> bytes | np.ndarray:
        """Return the bytes of an image file, or pixels `[height, width, 3]`."""
        ...


class ImageArray:
    """Images in memory, `[n, height, width, 3]`, uint8.

    >>> decode(ImageArray(np.zeros((2, 4, 6, 3), np.uint8), np.array([0, 1])), 1).size
    (6, 4)
    """

    groups = None

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, origin: str = "the array"):
        if len(pixels) != len(labels):
            raise ValueError(f"{origin} has {len(pixels):,} images and {len(labels):,} labels; needs as many")
        self.pixels, self.labels, self.origin = pixels, labels.astype(np.int64), origin

    def name(self, item: int) -> str:
        """Return the number of an image."""
        return f"image {item} of {self.origin}"

    def raw(self, item: int) -> np.ndarray:
        """Return the pixels of an image."""
        return self.pixels[item]


class ClassFolders:
    """One file per image, in `folder/CLASS/`; classes are numbered in the order of names."""

    groups = None

    def __init__(self, folder: Path, classes: Sequence[str]):
        self.folder, paths, labels = folder, list[str](), list[int]()
        for label, name in enumerate(classes):
            inside = (folder / name).iterdir() if (folder / name).is_dir() else ()
            shown = (path for path in inside if not path.name.startswith("."))  # macOS adds ._NAME to each file
            found = sorted(path.name for path in shown if path.suffix.lower() in SUFFIXES)
            paths += [f"{name}/{file}" for file in found]
            labels += [label] * len(found)
        self.paths, self.labels = np.array(paths, dtype=np.str_), np.array(labels, np.int64)

    def name(self, item: int) -> str:
        """Return the path of an image."""
        return str(self.folder / str(self.paths[item]))

    def raw(self, item: int) -> bytes:
        """Return the content of an image file."""
        with open_regular(self.name(item)) as file:  # a named pipe would make the run wait
            return file.read()


class Subset:
    """Some of the images of a split."""

    def __init__(self, whole: Split, items: np.ndarray):
        self.whole, self.items, self.labels = whole, items, whole.labels[items]
        self.groups = None if whole.groups is None else whole.groups[items]

    def name(self, item: int) -> str:
        """Return that of the whole split."""
        return self.whole.name(int(self.items[item]))

    def raw(self, item: int) -> bytes | np.ndarray:
        """Return that of the whole split."""
        return self.whole.raw(int(self.items[item]))


def decode(split: Split, item: int, least: int = 0) -> Any:
    """Decode an image to PIL in RGB; `Broken` if it cannot be read.

    With `least`, a JPEG is decoded at a half, a fourth or an eighth of its size if both sides keep `least` pixels,
    which is faster.
    """
    from PIL import Image

    with reading(split.name(item)):
        raw = split.raw(item)
        if isinstance(raw, np.ndarray):
            return Image.fromarray(raw)
        with Image.open(io.BytesIO(raw)) as file:
            if least:
                file.draft(None, (least, least))
            return to_rgb(file)


def image_batches(split: Split, size: int, *, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    """Return the images of each batch of an epoch; the order depends on seed and epoch only.

    An incomplete last batch is left out. Images that are read in groups (row groups of Parquet) stay near each other:
    groups are shuffled, then the images of 16 groups together.

    Raises:
        ValueError: If there are fewer than `size` images.

    >>> [len(batch) for batch in image_batches(ImageArray(np.zeros((5, 1, 1, 3), np.uint8), np.zeros(5)), 2)]
    [2, 2]
    """
    count = len(split.labels)
    if count < size:
        raise ValueError(f"a batch of {size} images needs as many to train on; there are {count}")
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    if split.groups is None:
        order = torch.randperm(count, generator=generator).numpy()
    else:
        by_group = np.argsort(split.groups, kind="stable")
        members = np.split(by_group, np.flatnonzero(np.diff(split.groups[by_group])) + 1)
        shuffled = [members[at] for at in torch.randperm(len(members), generator=generator).tolist()]
        windows = [np.concatenate(shuffled[at : at + WINDOW]) for at in range(0, len(shuffled), WINDOW)]
        order = np.concatenate([w[torch.randperm(len(w), generator=generator).numpy()] for w in windows])
    return order[: count // size * size].reshape(-1, size).tolist()
