"""Pictures with boxes and outlines, in COCO's JSON: read, checked, decoded.

What is wrong is left out and counted, or with `broken="refuse"` is an error. What the file itself contradicts (an
annotation of a picture or a kind that it does not list) is always one.
"""

import collections
import dataclasses
import json
import lzma
import zlib
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from normkit.lab.data.image_files import Files, pixels, size_of
from normkit.lab.data.lines import open_bytes
from normkit.lab.data.segmentation import drawable, filled, finite

Broken = Literal["skip", "refuse"]
SLACK = 1.0  # pixels over the edge that are rounding
LEAST = 0.01  # pixels that a box has at least along each side, so that its corners differ in float32
KEYS: dict[str, dict[str, type]] = {
    "images": {"id": int, "file_name": str, "height": int, "width": int},
    "annotations": {"image_id": int, "category_id": int, "bbox": object},
    "categories": {"id": int, "name": str},
}
"""What is read of each list of the JSON, and what it is there."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """A picture by its file, and its things: boxes `[n, 4]` as (x1, y1, x2, y2), kinds `[n]` from 1, COCO's outlines.

    An outline is None where none was given.
    """

    number: int
    file: str
    height: int
    width: int
    boxes: Tensor
    labels: Tensor
    outlines: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Scenes:
    """The scenes of a split; `truth` is COCO's JSON of these pictures, to score against, as pycocotools reads it."""

    scenes: tuple[Scene, ...]
    files: Files
    kinds: dict[int, str]
    """COCO's number of a kind: its name; labels count these from 1."""
    counts: dict[str, int]
    """Pictures and boxes that there are, and what was left out, by reason."""
    truth: dict[str, Any]

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def outlined(self) -> bool:
        """Whether every thing has an outline."""
        return all(outline is not None for scene in self.scenes for outline in scene.outlines)

    def picture(self, index: int) -> Tensor:
        """A picture as bytes `[3, height, width]`; ValueError, saying why, where it is missing or broken."""
        return pixels(self.files, self.scenes[index].file)

    def masks(self, index: int) -> Tensor:
        """The things of a picture as masks of 0 and 1, `[n, height, width]`."""
        scene = self.scenes[index]
        masks = [filled(outline, scene.height, scene.width) for outline in scene.outlines]
        return torch.stack(masks) if masks else torch.zeros(0, scene.height, scene.width, dtype=torch.uint8)


class _Box(NamedTuple):
    corners: tuple[float, float, float, float]
    label: int
    outline: Any


def read_scenes(path: str | Path, files: Files, broken: Broken = "skip", empty: bool = True) -> Scenes:
    """Read COCO's JSON (plain, `.xz` or `.gz`) whose pictures are `files`, and check everything but pixels.

    `empty=False` leaves out pictures without things, which teach a detector little. Crowds (`iscrowd`) are in `truth`
    alone: COCO's scores neither want nor punish boxes there. ValueError where the JSON is none or contradicts itself,
    where nothing is left, and with `broken="refuse"` at the first thing that is wrong.
    """
    path = Path(path)
    given = _parsed(path)
    kinds = {kind["id"]: str(kind["name"]) for kind in sorted(given["categories"], key=lambda kind: kind["id"])}
    labels = {kind: label for label, kind in enumerate(kinds, 1)}
    left_out: collections.Counter[str] = collections.Counter()

    def problem(what: str, where: str) -> None:
        if broken == "refuse":
            raise ValueError(f"{path}: {what}: {where}; broken=skip leaves such out and counts them")
        left_out[what] += 1

    of_picture: dict[int, list[dict[str, Any]]] = {}
    pictures = {}
    for picture in given["images"]:
        if picture["id"] in pictures:
            problem("pictures listed twice", picture["file_name"])
        elif why := _unusable(picture, files):
            problem(*why)
        else:
            pictures[picture["id"]] = picture
            of_picture[picture["id"]] = []
    known = {picture["id"] for picture in given["images"]}
    for note in given["annotations"]:
        if note["image_id"] not in known or note["category_id"] not in labels:
            what = "picture" if note["image_id"] not in known else "kind"
            number = note["image_id"] if what == "picture" else note["category_id"]
            raise ValueError(f"{path}: annotation {note.get('id')} is of {what} {number}, which the file does not list")
        if note["image_id"] in of_picture:
            of_picture[note["image_id"]].append(note)

    scenes, truth = [], []
    for number, picture in pictures.items():
        boxes, told = _boxes(picture, of_picture[number], labels, problem, left_out)
        if not boxes and not empty:
            left_out["pictures without boxes"] += 1
            continue
        corners = torch.tensor([box.corners for box in boxes], dtype=torch.float32).view(-1, 4)
        classes = torch.tensor([box.label for box in boxes], dtype=torch.long)
        size = picture["height"], picture["width"]
        scenes.append(Scene(number, picture["file_name"], *size, corners, classes, tuple(b.outline for b in boxes)))
        truth += told
    if not scenes:
        raise ValueError(f"{path} has no picture that can be used; left out: {_listed(left_out)}")
    counts = {"pictures": len(scenes), "boxes": sum(len(scene.labels) for scene in scenes), **sorted_counts(left_out)}
    whole = {
        "images": [pictures[scene.number] for scene in scenes],
        "annotations": [{**note, "id": at} for at, note in enumerate(truth, 1)],  # pycocotools takes 0 for "not found"
        "categories": given["categories"],
    }
    return Scenes(tuple(scenes), files, kinds, counts, whole)


def sorted_counts(counts: dict[str, int]) -> dict[str, int]:
    """What was left out, in alphabetical order."""
    return {what: counts[what] for what in sorted(counts)}


def _parsed(path: Path) -> dict[str, Any]:
    """The JSON, if it has the parts that are read here."""
    try:
        with open_bytes(path) as file:
            given = json.load(file)
    except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; get it again") from None
    for part, keys in KEYS.items():
        rows = given.get(part) if isinstance(given, dict) else None
        if not isinstance(rows, list):
            raise ValueError(f"{path} is not COCO's JSON: it has no list {part!r}")
        for row in rows:
            lacking = [key for key in keys if not isinstance(row, dict) or key not in row]
            if lacking:
                raise ValueError(f"{path} is not COCO's JSON: a row of {part!r} has no {', '.join(lacking)}")
            for key, kind in keys.items():
                if not isinstance(row[key], kind):
                    what = "a whole number" if kind is int else "text"
                    raise ValueError(
                        f"{path} is not COCO's JSON: a row of {part!r} has {key} = {row[key]!r}; needs {what}"
                    )
    return given


def _unusable(picture: dict[str, Any], files: Files) -> tuple[str, str] | None:
    """What is wrong with a picture, and where; None where nothing is."""
    name = picture["file_name"]
    if name not in files:
        return "missing pictures", f"{files.path} has no {name}"
    try:
        size = size_of(files, name)
    except ValueError as error:
        return "pictures that cannot be read", str(error)
    said = picture["width"], picture["height"]
    if size != said:
        return "pictures of another size", f"{name} is {size[0]} x {size[1]}, listed as {said[0]} x {said[1]}"
    return None


def _boxes(
    picture: dict[str, Any], notes: list[dict[str, Any]], labels: dict[int, int], problem: Any, out: Any
) -> tuple[list[_Box], list[dict[str, Any]]]:
    """The boxes of a picture that can be used, and the annotations that can be scored against."""
    found: dict[tuple, _Box] = {}
    told = []
    width, height = picture["width"], picture["height"]
    for note in notes:
        where = f"annotation {note.get('id')} of {picture['file_name']}"
        box = note["bbox"]
        if not _four(box):
            problem("boxes that are not four numbers", f"{where} has {box}")
            continue
        if not drawable(note.get("segmentation"), height, width):
            problem("outlines that cannot be drawn", where)
            continue
        told.append(_scored(note, width, height))
        if note.get("iscrowd"):
            out["crowds"] += 1
            continue
        x, y, w, h = box
        corners = max(x, 0.0), max(y, 0.0), min(x + w, width), min(y + h, height)
        over = max(-x, -y, x + w - width, y + h - height)
        if w < LEAST or h < LEAST:
            problem("boxes without area", f"{where} is {w} x {h}")
        elif corners[2] - corners[0] < LEAST or corners[3] - corners[1] < LEAST:
            problem("boxes outside their picture", f"{where} is at {box} of {width} x {height}")
        elif (key := (*corners, note["category_id"])) in found:
            problem("boxes given twice", f"{where} repeats {box}")
        else:
            if over > SLACK:
                problem("boxes cut at the edge", f"{where} is at {box} of {width} x {height}")
            found[key] = _Box(corners, labels[note["category_id"]], note.get("segmentation") or None)
    return list(found.values()), told


def _scored(note: dict[str, Any], width: int, height: int) -> dict[str, Any]:
    """An annotation as it was given, with all that pycocotools reads; a crowd's outline may be lacking."""
    x, y, w, h = note["bbox"]
    area = note["area"] if finite(note.get("area")) else w * h
    left, right = (min(max(at, 0), width) for at in (x, x + w))
    top, bottom = (min(max(at, 0), height) for at in (y, y + h))
    outline = note.get("segmentation") or [[left, top, right, top, right, bottom, left, bottom]]
    return {**note, "iscrowd": int(bool(note.get("iscrowd"))), "area": area, "segmentation": outline}


def _four(box: object) -> bool:
    return isinstance(box, list) and len(box) == 4 and all(map(finite, box))


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in sorted_counts(counts).items()) or "nothing"
