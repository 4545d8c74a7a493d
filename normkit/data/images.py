"""Data sets of pictures by name: where they are found, how large they must be, where one gets them.

`NORMKIT_DATA` names folders that hold a folder for each data set, as for the corpora; a path in place of a name is such
a folder, or a folder of one's own. A folder of one's own, and ImageNet's, hold their splits in one of three forms:

| form | training split | test split |
|---|---|---|
| a file a picture | train/CLASS/*.JPEG | val/CLASS/*.JPEG |
| WebDataset | *train*.tar: KEY.jpg beside KEY.cls or KEY.json | *val*.tar |
| Parquet | *train*.parquet: columns image (bytes) and label | *val*.parquet |

Shards lie in the folder itself or in its `data`, `train`, `val`. A split "test" beside "val" is the test split, and
"val" then the one that training looks at.
"""

import dataclasses
import difflib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from normkit.data.cifar import read_cifar
from normkit.data.corpora import VARIABLE
from normkit.data.pictures import Files, Part, Split
from normkit.data.vocab import Vocab

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
ALIASES = {"train": ("train",), "valid": ("val", "valid", "validation"), "test": ("test",)}
Tell = Callable[[str], object]
Splits = dict[str, Split]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageSet:
    """A data set of pictures: its folder, its figures, the mean and deviation of its colours, where one gets it."""

    name: str
    folders: tuple[str, ...]
    classes: int
    counts: dict[str, int]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    origin: str

    def here(self) -> str:
        """Whether its folder is found, or where one gets it."""
        try:
            _locate(self.name)
        except ValueError:
            return f"not here; {self.origin}"
        return "here"


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


def _cifar(classes: int, mean: tuple[float, float, float], std: tuple[float, float, float]) -> ImageSet:
    archive = {10: "cifar-10-binary.tar.gz", 100: "cifar-100-binary.tar.gz"}[classes]
    return ImageSet(
        name=f"cifar{classes}",
        folders=(f"cifar{classes}", "cifar-10-batches-bin" if classes == 10 else "cifar-100-binary"),
        classes=classes,
        counts={"train": 50_000, "test": 10_000},
        mean=mean,
        std=std,
        origin=f"cs.toronto.edu/~kriz/cifar.html, the binary version ({archive}), unpacked",
    )


IMAGE_SETS: dict[str, ImageSet] = {
    row.name: row
    for row in (
        _cifar(10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        _cifar(100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
        ImageSet(
            name="imagenet",
            folders=("imagenet", "ILSVRC2012", "imagenet-1k"),
            classes=1000,
            counts={"train": 1_281_167, "test": 50_000},
            mean=IMAGENET_MEAN,
            std=IMAGENET_STD,
            origin="image-net.org (ILSVRC2012, train and val, val sorted into folders of classes), or as shards from "
            "huggingface.co/datasets/ILSVRC/imagenet-1k (Parquet) or timm/imagenet-1k-wds (WebDataset)",
        ),
    )
}
"""By name."""


def find_images(name: str) -> tuple[ImageSet | None, Path]:
    """The row and the folder of a data set by its name, or of a folder of one's own.

    ValueError where there is no such name, or no such folder: it says where it was looked for, where one gets it.
    """
    if name in IMAGE_SETS:
        return IMAGE_SETS[name], _locate(name)
    if Path(name).is_dir():
        known = [row for row in IMAGE_SETS.values() if Path(name).name in row.folders]
        return (known[0] if known else None), Path(name)
    close = difflib.get_close_matches(name, IMAGE_SETS, n=1)
    hint = f" (did you mean {close[0]!r}?)" if close else ""
    raise ValueError(
        f"there are no pictures {name!r}{hint}; there are {', '.join(IMAGE_SETS)}, or name a folder of pictures"
    )


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


def _locate(name: str) -> Path:
    row = IMAGE_SETS[name]
    roots = [Path(root) for root in os.environ.get(VARIABLE, "").split(os.pathsep) if root]
    found = [root / folder for root in roots for folder in row.folders if (root / folder).is_dir()]
    if found:
        return found[0]
    where = (
        f"{' or '.join(map(str, roots))} has none of " if roots else f"{VARIABLE} is not set; set it to a folder with "
    )
    raise ValueError(
        f"{name} is not here: {where}{', '.join(f'{f}/' for f in row.folders)}. One gets it from {row.origin}"
    )


def _read_folder(folder: Path, refuse: bool, tell: Tell) -> tuple[Splits, list[str], list[str]]:
    """The splits of a folder in whichever form they are, the names of the classes, and what is wrong with them."""
    from normkit.data.shards import Rows, Tars

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
    if "test" not in splits and "valid" in splits:
        splits["test"] = splits.pop("valid")
    missing = [split for split in ("train", "test") if split not in splits]
    if missing:
        wanted = {"train": "train/CLASS/*.JPEG", "test": "val/CLASS/*.JPEG"}
        raise ValueError(
            f"{folder} lacks {' and '.join(wanted[split] for split in missing)}; pictures may also be shards, "
            "*train*.tar and *val*.tar, or *.parquet"
        )
    most = 1 + max(int(part.labels.max(initial=-1)) for part in splits.values())
    return splits, classes or [str(number) for number in range(most)], notes


def _shards(folder: Path, split: str, kind: str) -> list[Path]:
    """The shards of a split, in order."""
    inside = [path for place in ("data", split) for path in (folder / place).glob(f"*.{kind}")]
    every = {path for path in (*folder.glob(f"*.{kind}"), *inside) if split in path.stem or path.parent.name == split}
    return sorted(every)
