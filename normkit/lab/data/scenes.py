"""Detection's data sets by name, and one's own: where their files are, how many pictures there must be."""

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from normkit.lab.data.coco import Broken, Scenes, read_scenes
from normkit.lab.data.corpora import VARIABLE
from normkit.lab.data.image_files import Files
from normkit.lab.data.lines import find_file
from normkit.lab.data.vocab import Vocab
from normkit.names import unknown


class Part(NamedTuple):
    """A split: its JSON, its pictures (a folder or a tar archive), and how many of these there are."""

    notes: str
    pictures: str
    many: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneSet:
    """A data set: what is trained on, and what is scored."""

    name: str
    folder: str
    train: Part
    test: Part
    said: str = ""
    """What a reader of a score should know."""
    origin: str
    """Where one gets it."""


@dataclasses.dataclass(frozen=True)
class SceneData:
    """A data set, read: validation and test are one split, of which nothing is chosen by."""

    name: str
    train: Scenes
    valid: Scenes
    test: Scenes
    vocabularies: dict[str, Vocab]


_PEDESTRIANS = "cis.upenn.edu/~jshi/ped_html, longer side 320 pixels, masks as COCO's run lengths"
_SMALL = Part("instances.json", "images.tar", 128)

SCENE_SETS: dict[str, SceneSet] = {
    "coco": SceneSet(
        name="coco",
        folder="coco",
        train=Part("annotations/instances_train2017.json", "train2017", 118_287),
        test=Part("annotations/instances_val2017.json", "val2017", 5_000),
        origin="cocodataset.org: train2017, val2017 and annotations of 2017, unpacked",
    ),
    "coco128_320": SceneSet(
        name="coco128_320",
        folder="coco128_320",
        train=_SMALL,
        test=_SMALL,
        said="scored on what it was trained on",
        origin="the first 128 pictures of COCO train2017, longer side 320 pixels",
    ),
    "pennfudan_320": SceneSet(
        name="pennfudan_320",
        folder="pennfudan_320",
        train=Part("train.json", "images.tar", 120),
        test=Part("val.json", "images.tar", 50),
        origin=_PEDESTRIANS,
    ),
}
"""By name."""


def find_scenes(name: str, broken: Broken = "skip") -> Callable[[], SceneData]:
    """How to read a data set: a row of SCENE_SETS, in a folder that NORMKIT_DATA names, or a folder of one's own.

    One's own has `train.json` and `valid.json` in COCO's form (plain, .xz or .gz) and the pictures in `images` or
    `images.tar`. ValueError, before anything is read, where there is no such name or a file is missing.
    """
    if name in SCENE_SETS:
        roots = [Path(root) for root in os.environ.get(VARIABLE, "").split(os.pathsep) if root]
        each = SCENE_SETS[name]
        folders = list(dict.fromkeys(root / part for root in roots for part in (each.folder, name)))
        if not folders:
            where = f"{VARIABLE} is not set; set it to a folder that holds {each.folder}/"
            raise ValueError(f"the data set {name} is not here: {where}. One gets it from {each.origin}")
    elif Path(name).is_dir():
        folders = [Path(name)]
        pictures = "images.tar" if (Path(name) / "images.tar").is_file() else "images"
        each = SceneSet(
            name=Path(name).name,
            folder=name,
            train=Part("train.json", pictures),
            test=Part("valid.json", pictures),
            origin="its owner",
        )
    else:
        raise unknown(SCENE_SETS, name, "data set", ", or name a folder")
    lacking = [_lacking(each, folder) for folder in folders]
    if [] not in lacking:
        least = min(range(len(folders)), key=lambda i: len(lacking[i]))
        where = f"{folders[least]} lacks {', '.join(lacking[least])}"
        raise ValueError(f"the data set {name} is not here: {where}. One gets it from {each.origin}")
    return functools.partial(_read, each, folders[lacking.index([])], broken)


def _lacking(each: SceneSet, folder: Path) -> list[str]:
    """The files of a data set that a folder has not."""
    notes = [part.notes for part in (each.train, each.test) if find_file(folder / part.notes) is None]
    pictures = [part.pictures for part in (each.train, each.test) if not (folder / part.pictures).exists()]
    return list(dict.fromkeys([*notes, *pictures]))


def _read(each: SceneSet, folder: Path, broken: Broken) -> SceneData:
    splits, said = [], [each.said] if each.said else []
    for part, what in ((each.train, "training"), (each.test, "test")):
        notes = find_file(folder / part.notes)
        assert notes is not None, "find_scenes has looked"
        scenes = read_scenes(notes, Files(folder / part.pictures), broken, empty=what == "test")
        found = scenes.counts["pictures"] + scenes.counts.get("pictures without boxes", 0)
        if part.many is not None and found != part.many:
            if broken == "refuse":
                raise ValueError(f"{notes} has {found:,} pictures, {each.name} has {part.many:,}; get it again")
            said.append(f"{found:,} of {part.many:,} {what} pictures")
        splits.append(scenes)
    train, test = dataclasses.replace(splits[0], truth={}), splits[1]
    if train.kinds != test.kinds:
        raise ValueError(f"{each.train.notes} and {each.test.notes} of {folder} list different kinds of things")
    name = f"{each.name} ({', '.join(said)})" if said else each.name
    return SceneData(name, train, test, test, {"classes": Vocab(train.kinds.values())})
