"""Pictures with classes, wherever they lie; a picture is decoded when it is asked for."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
WINDOW = 16  # groups of a file whose pictures are shuffled together


class Broken(ValueError):
    """A picture that cannot be read; says which and why."""


class Split(Protocol):
    """Pictures and the number of each one's class; `groups` says which of them are read together (None: each alone)."""

    @property
    def labels(self) -> np.ndarray:
        """`[N]`, whole numbers."""
        ...

    @property
    def groups(self) -> np.ndarray | None:
        """`[N]`, in order."""
        ...

    def name(self, item: int) -> str:
        """What an error calls the picture."""
        ...

    def raw(self, item: int) -> bytes | np.ndarray:
        """The bytes of its file, or its pixels `[height, width, 3]`."""
        ...


class Memory:
    """Pixels `[N, height, width, 3]`, uint8.

    >>> decoded(Memory(np.zeros((2, 4, 6, 3), np.uint8), np.array([0, 1])), 1).size
    (6, 4)
    """

    groups = None

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, origin: str = "the array"):
        if len(pixels) != len(labels):
            raise ValueError(f"{origin} has {len(pixels):,} pictures and {len(labels):,} labels; needs as many")
        self.pixels, self.labels, self.origin = pixels, labels.astype(np.int64), origin

    def name(self, item: int) -> str:
        """Its number in the array."""
        return f"picture {item} of {self.origin}"

    def raw(self, item: int) -> np.ndarray:
        """Its pixels."""
        return self.pixels[item]


class Files:
    """A file for each picture, in `folder/CLASS/`; classes are numbered in the order of their names."""

    groups = None

    def __init__(self, folder: Path, classes: Sequence[str]):
        self.folder, paths, labels = folder, list[str](), list[int]()
        for label, name in enumerate(classes):
            inside = (folder / name).iterdir() if (folder / name).is_dir() else ()
            found = sorted(path.name for path in inside if path.suffix.lower() in SUFFIXES)
            paths += [f"{name}/{file}" for file in found]
            labels += [label] * len(found)
        self.paths, self.labels = np.array(paths, dtype=np.str_), np.array(labels, np.int64)

    def name(self, item: int) -> str:
        """Its path."""
        return str(self.folder / str(self.paths[item]))

    def raw(self, item: int) -> bytes:
        """The content of the file."""
        return Path(self.name(item)).read_bytes()


class Part:
    """Some of the pictures of a split."""

    def __init__(self, whole: Split, items: np.ndarray):
        self.whole, self.items, self.labels = whole, items, whole.labels[items]
        self.groups = None if whole.groups is None else whole.groups[items]

    def name(self, item: int) -> str:
        """As the whole split has it."""
        return self.whole.name(int(self.items[item]))

    def raw(self, item: int) -> bytes | np.ndarray:
        """As the whole split has it."""
        return self.whole.raw(int(self.items[item]))


def decoded(split: Split, item: int, least: int = 0) -> Any:
    """A picture as PIL has it, in RGB; `Broken`, which says where it lies, when it cannot be read.

    With `least` a JPEG may come at a half, a fourth or an eighth of its size, both sides not below so many pixels:
    libjpeg then unpacks a fraction of the file's numbers.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        raw = split.raw(item)
        if isinstance(raw, np.ndarray):
            return Image.fromarray(raw)
        with Image.open(io.BytesIO(raw)) as file:
            if least:
                file.draft(None, (least, least))
            return file.convert("RGB")
    except UnidentifiedImageError:  # its message has an address, another one each time
        raise Broken(f"{split.name(item)} cannot be read: it is no picture of a known kind") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        file = getattr(error, "filename", None)
        what = str(error).replace(str(file), "it") if file else str(error)
        raise Broken(f"{split.name(item)} cannot be read: {what or type(error).__name__}") from None


def picture_batches(split: Split, size: int, *, seed: int = 0, epoch: int = 0) -> list[list[int]]:
    """Indices of the pictures of each batch of an epoch, `size` of them; those that are left over wait for the next.

    The order is a pure function of seed and epoch. Pictures that are read in groups (row groups of Parquet) stay near
    each other: groups are shuffled, then the pictures of 16 groups together. ValueError where there are fewer than
    `size` pictures.

    >>> [len(batch) for batch in picture_batches(Memory(np.zeros((5, 1, 1, 3), np.uint8), np.zeros(5)), 2)]
    [2, 2]
    """
    count = len(split.labels)
    if count < size:
        raise ValueError(f"a batch of {size} pictures needs as many to train on; there are {count}")
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
