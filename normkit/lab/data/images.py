"""Data sets of pictures, ready to be shown: CIFAR, ImageNet, folders of one's own.

A folder of one's own, and ImageNet's, hold their splits in one of three forms:

| form | training split | test split |
|---|---|---|
| a file a picture | train/CLASS/*.JPEG | val/CLASS/*.JPEG |
| WebDataset | *train*.tar: KEY.jpg beside KEY.cls or KEY.json | *val*.tar |
| Parquet | *train*.parquet: columns image (bytes) and label | *val*.parquet |

Shards lie in the folder itself or in its `data`, `train`, `val`. A split "test" beside "val" is the test split, and
"val" then the one that training looks at; unless all classes of "test" are below 0, as in ImageNet's, where they are
secret.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from normkit.lab.data.cifar import read_cifar
from normkit.lab.data.image_folder import Files, Part, Split
from normkit.lab.data.image_sets import IMAGENET_MEAN, IMAGENET_STD, find_images
from normkit.lab.data.vocab import Vocab

ALIASES = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}
Tell = Callable[[str], object]
Splits = dict[str, Split]


@dataclasses.dataclass(frozen=True)
class Album:
    """A data set of pictures, ready to be read. `notes` says what is not as it should be."""

    name: str
    train: Split
    valid: Split
    test: Split
    vocabularies: dict[str, Vocab]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    notes: tuple[str, ...] = ()


def read_images(name: str, *, held_out: int = 0, refuse: bool = False, tell: Tell = lambda said: None) -> Album:
    """Read what there is to know of a data set but the pictures: where each lies, and its class.

    `held_out` training pictures, always the same, are the validation split; with 0 it is the data set's own or else
    the test split. A data set of the table that has other counts than it should is noted in `notes`, or, with
    `refuse`, a ValueError; so are shards that are cut short.
    """
    row, folder = find_images(name)
    if row is not None and row.name.startswith("cifar"):
        tell(f"reading {row.name}")
        train, test, classes = read_cifar(folder, row.classes)
        splits, notes = {"train": train, "test": test}, []
    else:
        splits, classes, notes = _read_folder(folder, refuse, tell)
    if row is not None:
        found = {"classes": len(classes), **{split: len(splits[split].labels) for split in row.counts}}
        for what, wanted in {"classes": row.classes, **row.counts}.items():
            if found[what] != wanted:
                pictures = "classes" if what == "classes" else f"pictures in its {what} split"
                notes.append(f"{folder} has {found[what]:,} {pictures}, {row.name} has {wanted:,}")
    if notes and refuse:
        raise ValueError(f"{notes[0]}; get it from {row.origin if row else 'its owner'}, or --broken skip")
    train = splits["train"]
    valid = splits.get("valid", splits["test"])
    if held_out:
        count = len(train.labels)
        if held_out >= count:
            raise ValueError(f"images.held_out must be below the {count:,} training pictures; got {held_out}")
        order = np.random.default_rng(0).permutation(count)
        valid, train = Part(train, np.sort(order[:held_out])), Part(train, np.sort(order[held_out:]))
    for split, part in (("training", train), ("test", splits["test"])):
        if not len(part.labels):
            raise ValueError(f"the {split} split of {folder} has no pictures")
    mean, std = (row.mean, row.std) if row else (IMAGENET_MEAN, IMAGENET_STD)
    label = row.name if row else folder.name
    return Album(label, train, valid, splits["test"], {"classes": Vocab(classes)}, mean, std, tuple(notes))


def _read_folder(folder: Path, refuse: bool, tell: Tell) -> tuple[Splits, list[str], list[str]]:
    """The splits of a folder in whichever form they are, the names of the classes, and what is wrong with them."""
    from normkit.lab.data.shards import Rows, Tars

    splits: Splits = {}
    classes: list[str] = []
    notes: list[str] = []
    for split, names in ALIASES.items():
        for name in names:
            if tars := _shards(folder, name, "tar"):
                splits[split] = Tars(tars, notes, tell)
            elif rows := _shards(folder, name, "parquet"):
                splits[split] = Rows(rows)
            elif (folder / name).is_dir():
                found = sorted(path.name for path in (folder / name).iterdir() if path.is_dir())
                if not found:
                    raise ValueError(f"{folder / name} has no folders of classes; needs {name}/CLASS/*.JPEG")
                unknown = sorted(set(found) - set(classes or found))
                if unknown:
                    raise ValueError(f"{folder / name} has a class {unknown[0]!r} that the training split has not")
                classes = classes or found
                tell(f"listing {folder / name}")
                splits[split] = Files(folder / name, classes)
            if split in splits:
                break
    if "test" in splits and "valid" in splits and (splits["test"].labels < 0).all():
        tell(f"the test split of {folder} has no classes, that of validation is scored")
        del splits["test"]
    if "test" not in splits and "valid" in splits:
        splits["test"] = splits.pop("valid")
    missing = [split for split in ("train", "test") if split not in splits]
    if missing:
        wanted = {"train": "train/CLASS/*.JPEG", "test": "val/CLASS/*.JPEG"}
        raise ValueError(
            f"{folder} lacks {' and '.join(wanted[split] for split in missing)}; pictures may also be shards, "
            "*train*.tar and *val*.tar, or *.parquet"
        )
    for split, part in splits.items():
        if int(part.labels.min(initial=0)) < 0:
            raise ValueError(
                f"the {split} split of {folder} has a class {int(part.labels.min())}; classes are numbered from 0"
            )
    most = 1 + max(int(part.labels.max(initial=-1)) for part in splits.values())
    return splits, classes or [str(number) for number in range(most)], notes


def _shards(folder: Path, split: str, kind: str) -> list[Path]:
    """The shards of a split, in order."""
    inside = [path for place in ("data", split) for path in (folder / place).glob(f"*.{kind}")]
    every = {path for path in (*folder.glob(f"*.{kind}"), *inside) if split in path.stem or path.parent.name == split}
    return sorted(every)
