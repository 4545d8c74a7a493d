"""Image data sets: CIFAR, ImageNet, folders of your own.

ImageNet, and a folder of your own, have their splits in one of three formats:

| format | training split | test split |
|---|---|---|
| one file per image | train/CLASS/*.JPEG | val/CLASS/*.JPEG |
| WebDataset | *train*.tar: KEY.jpg beside KEY.cls or KEY.json | *val*.tar |
| Parquet | *train*.parquet: columns image (bytes) and label | *val*.parquet |

Shards are in the folder itself or in its `data`, `train`, `val`. If there is a split "test" beside "val", "val" is the
validation split; unless all classes of "test" are negative, as in ImageNet's, where they are secret.
"""

import dataclasses
from pathlib import Path

import numpy as np

from normkit_papers.data import OnStage
from normkit_papers.data.cifar import read_cifar
from normkit_papers.data.image_folder import ClassFolders, Split, Subset
from normkit_papers.data.image_sets import IMAGENET_MEAN, IMAGENET_STD, find_images
from normkit_papers.data.vocab import Vocab

ALIASES = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}
MOST_CLASSES = 1_000_000  # larger numbers, such as 2**32 - 1 for "none", would fill the memory with names
Splits = dict[str, Split]


@dataclasses.dataclass(frozen=True)
class ImageData:
    """An image data set, decoded when used; `notes` lists deviations from the expected."""

    name: str
    train: Split
    valid: Split
    test: Split
    vocabularies: dict[str, Vocab]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    notes: tuple[str, ...] = ()


def read_images(
    name: str, *, held_out: int = 0, refuse: bool = False, on_stage: OnStage = lambda stage: None
) -> ImageData:
    """List the images of a data set and their classes; no image is decoded.

    Args:
        name: A row of IMAGE_SETS, or a folder.
        held_out: Training images, always the same, that make the validation split; 0 uses the data set's own, or else
            the test split.
        refuse: Raise an error for unexpected counts and shards that are cut short, which `notes` lists otherwise.
        on_stage: Called with a description of each stage.

    Raises:
        ValueError: If the data set is missing or damaged.
    """
    row, folder = find_images(name)
    if row is not None and row.name.startswith("cifar"):
        on_stage(f"reading {row.name}")
        train, test, classes = read_cifar(folder, row.classes)
        splits, notes = {"train": train, "test": test}, []
    else:
        splits, classes, notes = _read_folder(folder, on_stage)
    if row is not None:
        found = {"classes": len(classes), **{split: len(splits[split].labels) for split in row.counts}}
        for what, expected in {"classes": row.classes, **row.counts}.items():
            if found[what] != expected:
                counted = "classes" if what == "classes" else f"images in its {what} split"
                notes.append(f"{folder} has {found[what]:,} {counted}, {row.name} has {expected:,}")
    if notes and refuse:
        raise ValueError(f"{notes[0]}; get it from {row.origin if row else 'its owner'}, or --broken skip")
    train = splits["train"]
    valid = splits.get("valid", splits["test"])
    if held_out:
        count = len(train.labels)
        if held_out >= count:
            raise ValueError(f"images.held_out must be below the {count:,} training images; got {held_out}")
        order = np.random.default_rng(0).permutation(count)
        valid, train = Subset(train, np.sort(order[:held_out])), Subset(train, np.sort(order[held_out:]))
    for split, part in (("training", train), ("test", splits["test"])):
        if not len(part.labels):
            raise ValueError(f"the {split} split of {folder} has no images")
    mean, std = (row.mean, row.std) if row else (IMAGENET_MEAN, IMAGENET_STD)
    label = row.name if row else folder.name
    return ImageData(label, train, valid, splits["test"], {"classes": Vocab(classes)}, mean, std, tuple(notes))


def _read_folder(folder: Path, on_stage: OnStage) -> tuple[Splits, list[str], list[str]]:
    """Return the splits of a folder, the names of the classes, and the problems found."""
    from normkit_papers.data.shards import Rows, Tars

    splits: Splits = {}
    classes: list[str] = []
    notes: list[str] = []
    for split, names in ALIASES.items():
        for name in names:
            inside = (folder / name).iterdir() if (folder / name).is_dir() else ()
            if found := sorted(path.name for path in inside if path.is_dir() and not path.name.startswith(".")):
                unknown = sorted(set(found) - set(classes or found))
                if unknown:
                    raise ValueError(f"{folder / name} has a class {unknown[0]!r} that the training split has not")
                classes = classes or found
                on_stage(f"listing {folder / name}")
                splits[split] = ClassFolders(folder / name, classes)
            elif tars := _shards(folder, name, "tar"):
                splits[split] = Tars(tars, notes, on_stage)
            elif rows := _shards(folder, name, "parquet"):
                splits[split] = Rows(rows)
            elif (folder / name).is_dir():
                raise ValueError(f"{folder / name} has no folders of classes; needs {name}/CLASS/*.JPEG")
            if split in splits:
                break
    if "test" in splits and "valid" in splits and (splits["test"].labels < 0).all():
        on_stage(f"the test split of {folder} has no classes; the validation split is scored")
        del splits["test"]
    if "test" not in splits and "valid" in splits:
        splits["test"] = splits.pop("valid")
    missing = [split for split in ("train", "test") if split not in splits]
    if missing:
        expected = {"train": "train/CLASS/*.JPEG", "test": "val/CLASS/*.JPEG"}
        raise ValueError(
            f"{folder} lacks {' and '.join(expected[split] for split in missing)}; images may also be shards, "
            "*train*.tar and *val*.tar, or *.parquet"
        )
    for split, part in splits.items():
        count = len(classes) or MOST_CLASSES
        if len(wrong := part.labels[(part.labels < 0) | (part.labels >= count)]):
            raise ValueError(
                f"the {split} split of {folder} has a class {wrong[0]}; classes are numbered from 0, "
                f"and below {count:,}"
            )
    most = 1 + max(int(part.labels.max(initial=-1)) for part in splits.values())
    return splits, classes or [str(number) for number in range(most)], notes


def _shards(folder: Path, split: str, kind: str) -> list[Path]:
    """Return the shards of a split, in order."""
    own = folder / split
    every = sorted(path for place in (folder, folder / "data", own) for path in place.glob(f"*.{kind}"))
    every = [path for path in every if split in path.stem or path.parent == own]
    for path in every:
        if path.parent != own and sum(names[0] in path.stem for names in ALIASES.values()) > 1:
            raise ValueError(f"{path} has the names of several splits; rename it, or move it into a folder {split}")
    return every
