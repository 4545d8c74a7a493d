"""Detection data sets, by name or in a folder of your own: files and numbers of images."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from normkit._util import unknown
from normkit_papers.data.coco import Broken, Scenes, read_scenes
from normkit_papers.data.corpora import data_roots, not_here
from normkit_papers.data.image_files import ImageFiles
from normkit_papers.data.lines import find_file
from normkit_papers.data.vocab import Vocab


class SplitPaths(NamedTuple):
    """A split: its JSON, its images (a folder or a tar archive) and their number."""

    annotations: str
    images: str
    count: int | None = None  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneSet:
    """A detection data set: training and test split."""

    name: str
    """Its name, and that of its folder."""
    train: SplitPaths
    test: SplitPaths
    remark: str = ""
    """Remark on its scores, part of the name in results."""
    origin: str
    """Source."""


@dataclasses.dataclass(frozen=True)
class SceneData:
    """A data set that has been read; validation and test are one split, which selects nothing."""

    name: str
    train: Scenes
    valid: Scenes
    test: Scenes
    vocabularies: dict[str, Vocab]


_SMALL = SplitPaths("instances.json", "images.tar", 128)

SCENE_SETS: dict[str, SceneSet] = {
    "coco": SceneSet(
        name="coco",
        train=SplitPaths("annotations/instances_train2017.json", "train2017", 118_287),
        test=SplitPaths("annotations/instances_val2017.json", "val2017", 5_000),
        origin="cocodataset.org: train2017, val2017 and annotations of 2017, unpacked",
    ),
    "coco128_320": SceneSet(
        name="coco128_320",
        train=_SMALL,
        test=_SMALL,
        remark="scored on what it was trained on",
        origin="the first 128 images of COCO train2017, longer side 320 pixels",
    ),
    "pennfudan_320": SceneSet(
        name="pennfudan_320",
        train=SplitPaths("train.json", "images.tar", 120),
        test=SplitPaths("val.json", "images.tar", 50),
        origin="cis.upenn.edu/~jshi/ped_html, longer side 320 pixels, masks as COCO's run lengths",
    ),
}
"""By name."""


def find_scenes(name: str, broken: Broken = "skip") -> Callable[[], SceneData]:
    """Return a function that reads a data set.

    Args:
        name: A row of SCENE_SETS, in a folder that NORMKIT_DATA lists; or a folder of your own, with `train.json` and
            `valid.json` in COCO's format (plain, .xz or .gz) and the images in `images` or `images.tar`.
        broken: "skip" leaves out and counts unusable entries; "refuse" makes the first one an error.

    Raises:
        ValueError: If the name is unknown or a file is missing. Nothing has been read then.
    """
    if name in SCENE_SETS:
        each = SCENE_SETS[name]
        folders = [root / name for root in data_roots()]
    elif Path(name).is_dir():
        folders = [Path(name)]
        images = "images.tar" if (Path(name) / "images.tar").is_file() else "images"
        each = SceneSet(
            name=Path(name).absolute().name,
            train=SplitPaths("train.json", images),
            test=SplitPaths("valid.json", images),
            origin="its owner",
        )
    else:
        raise unknown(SCENE_SETS, name, "data set", ", or name a folder")
    missing = {folder: _missing(each, folder) for folder in folders}
    complete = next((folder for folder in folders if not missing[folder]), None)
    if complete is None:
        raise not_here(f"the data set {name}", name, each.origin, missing)
    return functools.partial(_read, each, complete, broken)


def _missing(each: SceneSet, folder: Path) -> list[str]:
    """Return the files of a data set that are missing in a folder."""
    parts = (each.train, each.test)
    annotations = [part.annotations for part in parts if find_file(folder / part.annotations) is None]
    images = [part.images for part in parts if not (folder / part.images).exists()]
    return list(dict.fromkeys([*annotations, *images]))


def _read(each: SceneSet, folder: Path, broken: Broken) -> SceneData:
    splits, remarks = [], [each.remark] if each.remark else []
    for part, what in ((each.train, "training"), (each.test, "test")):
        annotations = find_file(folder / part.annotations)
        assert annotations is not None, "checked by find_scenes"
        scenes = read_scenes(annotations, ImageFiles(folder / part.images), broken, empty=what == "test")
        found = scenes.counts["images"] + scenes.counts.get("images without boxes", 0)
        if part.count is not None and found != part.count:
            if broken == "refuse":
                raise ValueError(f"{annotations} has {found:,} images, {each.name} has {part.count:,}; get it again")
            remarks.append(f"{found:,} of {part.count:,} {what} images")
        splits.append(scenes)
    train, test = dataclasses.replace(splits[0], truth={}), splits[1]
    if train.categories != test.categories:
        raise ValueError(f"{each.train.annotations} and {each.test.annotations} of {folder} list different categories")
    name = f"{each.name} ({', '.join(remarks)})" if remarks else each.name
    return SceneData(name, train, test, test, {"classes": Vocab(train.categories.values())})
