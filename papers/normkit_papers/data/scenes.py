"""Images with boxes and outlines in COCO's JSON: by name, or in a folder of your own."""

import collections
import dataclasses
import functools
import io
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normkit._util import truncate
from normkit_papers.data import Data
from normkit_papers.data.files import find, find_file, open_bytes, table, undamaged
from normkit_papers.data.images import reading, to_rgb
from normkit_papers.data.vocab import Vocab

LEAST = 0.01  # pixels: minimum side of a box, so that its corners differ in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SceneSet:
    """A row of the table of detection data; `corpora.toml` explains its keys."""

    name: str
    folders: tuple[str, ...] = ()
    train: dict[str, Any]
    test: dict[str, Any]
    remark: str = ""
    origin: str


SCENE_SETS: dict[str, SceneSet] = {name: SceneSet(**row) for name, row in table("detection").items()}
"""By name."""


class ImageFiles:
    """Images of a folder or of an uncompressed tar archive, by name."""

    def __init__(self, path: Path):
        self.path = path
        self.members: dict[str, tuple[int, int]] | None = None
        if path.is_file():
            with undamaged(path), tarfile.open(path, "r:") as archive:
                files = (each for each in archive if each.isfile())
                self.members = {each.name.removeprefix("./"): (each.offset_data, each.size) for each in files}

    def __contains__(self, name: str) -> bool:
        return (self.path / name).is_file() if self.members is None else name in self.members

    def read(self, name: str) -> Tensor:
        """Read an image as uint8 RGB `[3, height, width]`; ValueError if it cannot be read."""
        from PIL import Image

        with reading(name):
            if self.members is None:
                content = (self.path / name).read_bytes()
            else:
                offset, size = self.members[name]
                with self.path.open("rb") as archive:
                    archive.seek(offset)
                    content = archive.read(size)
            with Image.open(io.BytesIO(content)) as image:
                return torch.from_numpy(np.array(to_rgb(image))).permute(2, 0, 1)


@dataclasses.dataclass(frozen=True)
class Scene:
    """An image file and its objects, crowds included.

    Boxes `[n, 4]` are (x1, y1, x2, y2), labels `[n]` count from 1, outlines are compressed run lengths or None, areas
    `[n]` are of the outlines, in pixels.
    """

    file: str
    height: int
    width: int
    boxes: Tensor
    labels: Tensor
    outlines: tuple[Any, ...]
    crowds: Tensor
    areas: Tensor


@dataclasses.dataclass(frozen=True)
class Scenes:
    """The scenes of a split."""

    scenes: tuple[Scene, ...]
    files: ImageFiles
    categories: dict[int, str]
    """COCO's numbers of the categories and their names; labels number these from 1."""
    counts: dict[str, int]
    """Numbers of images and boxes, of crowds, and of what was left out."""

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def has_outlines(self) -> bool:
        """True if every object has an outline."""
        return all(outline is not None for scene in self.scenes for outline in scene.outlines)

    def image(self, index: int) -> Tensor:
        """Read an image as uint8 `[3, height, width]`; ValueError if it is damaged or of another size."""
        scene = self.scenes[index]
        image = self.files.read(scene.file)
        if image.shape[1:] != (scene.height, scene.width):
            found = f"{image.shape[2]} x {image.shape[1]}"
            raise ValueError(f"{scene.file} is {found} pixels, but listed as {scene.width} x {scene.height}")
        return image

    def objects(self, index: int, masks: bool) -> dict[str, Tensor]:
        """Return the objects of an image for torchmetrics, with masks `[n, height, width]` of 0 and 1."""
        from pycocotools import mask

        scene = self.scenes[index]
        found = {"boxes": scene.boxes, "labels": scene.labels, "iscrowd": scene.crowds, "area": scene.areas}
        if masks:
            drawn = [torch.from_numpy(mask.decode(outline)) for outline in scene.outlines]
            none = torch.zeros(0, scene.height, scene.width, dtype=torch.uint8)
            found["masks"] = torch.stack(drawn) if drawn else none
        return found


def find_scenes(name: str) -> Callable[[], Data]:
    """Return a function that reads a data set of `Scenes`; validation and test are one split.

    Args:
        name: A row of SCENE_SETS; or a folder of your own, with `train.json` and `valid.json` in COCO's format (plain,
            .xz or .gz) and the images in `images` or `images.tar`.

    Raises:
        ValueError: If the name is unknown or a file is missing. Nothing has been read then.
    """
    row, folder = find(name, SCENE_SETS, "detection data set", _lacking)
    if row is None:
        images = "images.tar" if (folder / "images.tar").is_file() else "images"
        train, test = ({"annotations": f"{split}.json", "images": images} for split in ("train", "valid"))
        row = SceneSet(name=folder.name, train=train, test=test, origin="its owner")
        if missing := _lacking(row, folder):
            raise ValueError(f"{folder} lacks {', '.join(missing)}")
    return functools.partial(_read, row, folder)


def _lacking(row: SceneSet, folder: Path) -> list[str]:
    """Return the files of a data set that a folder lacks."""
    parts = (row.train, row.test)
    lacking = [part["annotations"] for part in parts if find_file(folder / part["annotations"]) is None]
    lacking += [part["images"] for part in parts if not (folder / part["images"]).exists()]
    return list(dict.fromkeys(lacking))


def _read(row: SceneSet, folder: Path) -> Data:
    splits, remarks = [], [row.remark] if row.remark else []
    for part, what in ((row.train, "training"), (row.test, "test")):
        path = find_file(folder / part["annotations"])
        assert path is not None, "checked by find_scenes"
        scenes = read_scenes(path, ImageFiles(folder / part["images"]), empty=what == "test")
        found = scenes.counts["images"] + scenes.counts.get("images without boxes", 0)
        if found != part.get("count", found):
            remarks.append(f"{found:,} of {part['count']:,} {what} images")
        splits.append(scenes)
    train, test = splits
    if train.categories != test.categories:
        raise ValueError(f"the two splits of {folder} list different categories; needs the same")
    name = f"{row.name} ({', '.join(remarks)})" if remarks else row.name
    vocabularies = {"classes": Vocab(train.categories.values())}
    return Data(name=name, train=train, valid=test, test=test, vocabularies=vocabularies)


def read_scenes(path: Path, files: ImageFiles, empty: bool = True) -> Scenes:
    """Read COCO's JSON.

    Boxes without area in their image are left out and counted. Crowds (`iscrowd`) are for scores alone, which ignore
    boxes there.

    Args:
        path: The JSON file, plain, `.xz` or `.gz`.
        files: The images.
        empty: Keep images without objects, from which a detector learns little.

    Raises:
        ValueError: If the file is not COCO's JSON, contradicts itself, or lists an image that is missing.
    """
    with undamaged(path):
        with open_bytes(path) as file:
            given = json.load(file)
        categories = {row["id"]: row["name"] for row in sorted(given["categories"], key=lambda row: row["id"])}
        images = {row["id"]: row for row in given["images"]}
        if len(categories) < len(given["categories"]) or len(images) < len(given["images"]):
            raise ValueError("two categories or two images have the same number")
        if missing := [row["file_name"] for row in given["images"] if row["file_name"] not in files]:
            raise ValueError(f"{files.path} lacks {', '.join(truncate(missing))}")
        labels = {category: label for label, category in enumerate(categories, 1)}
        objects: dict[int, list[tuple[Any, ...]]] = {number: [] for number in images}
        for row in given["annotations"]:
            height, width = (images[row["image_id"]][side] for side in ("height", "width"))
            corners = _corners(row["bbox"], height, width)
            crowd, area = row.get("iscrowd", 0), row.get("area") or row["bbox"][2] * row["bbox"][3]
            outline = _run_lengths(row.get("segmentation"), height, width)
            objects[row["image_id"]].append((corners, labels[row["category_id"]], outline, crowd, area))
    scenes, counts = [], collections.Counter[str]()
    for number, image in images.items():
        usable = [row for row in objects[number] if row[0] is not None]
        counts["boxes without area in their image"] += len(objects[number]) - len(usable)
        counts["crowds"] += (crowds := sum(row[3] for row in usable))
        if len(usable) == crowds and not empty:
            counts["images without boxes"] += 1
            continue
        counts["boxes"] += len(usable) - crowds
        boxes, kinds, outlines, is_crowd, areas = zip(*usable, strict=True) if usable else ((),) * 5
        scenes.append(Scene(
            image["file_name"], image["height"], image["width"], torch.tensor(boxes).float().view(-1, 4),
            torch.tensor(kinds, dtype=torch.long), outlines, torch.tensor(is_crowd, dtype=torch.long),
            torch.tensor(areas, dtype=torch.float64),
        ))  # fmt: skip
    if not scenes:
        raise ValueError(f"{path} has no image with a box")
    return Scenes(tuple(scenes), files, categories, {"images": len(scenes), **+counts})


def _corners(box: Sequence[float], height: int, width: int) -> tuple[float, ...] | None:
    """Return the corners of a box (x, y, width, height) inside its image; None if it has no area there."""
    x, y, w, h = box
    corners = max(x, 0.0), max(y, 0.0), min(x + w, width), min(y + h, height)
    return corners if corners[2] - corners[0] >= LEAST and corners[3] - corners[1] >= LEAST else None


def _run_lengths(outline: Any, height: int, width: int) -> Any:
    """Return polygons, or run lengths, as compressed run lengths; None if there is no outline."""
    from pycocotools import mask

    tools: Any = mask
    if not outline:
        return None
    if isinstance(outline, list):  # pycocotools would take fewer numbers for a box
        if any(len(ring) < 6 for ring in outline):
            raise ValueError(f"a polygon needs at least three corners; got {outline}")
        return tools.merge(tools.frPyObjects(outline, height, width))
    if outline["size"] != [height, width]:
        raise ValueError(f"run lengths of size {outline['size']} do not fit an image of {[height, width]}")
    return tools.frPyObjects(outline, height, width) if isinstance(outline["counts"], list) else outline
