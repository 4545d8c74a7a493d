"""Images with boxes and outlines, in COCO's JSON: read, checked, decoded.

Unusable entries are skipped and counted, or with `broken="refuse"` are an error. A contradiction in the file itself (an
annotation of an image or a category that it does not list) is always an error.
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

from normkit_papers.data.image_files import ImageFiles, image_size, read_image
from normkit_papers.data.lines import open_bytes
from normkit_papers.data.segmentation import drawable, filled, finite

Broken = Literal["skip", "refuse"]
SLACK = 1.0  # pixels outside the image that count as rounding
LEAST = 0.01  # pixels: minimum side of a box, so that its corners differ in float32
KEYS: dict[str, dict[str, type]] = {
    "images": {"id": int, "file_name": str, "height": int, "width": int},
    "annotations": {"image_id": int, "category_id": int, "bbox": object},
    "categories": {"id": int, "name": str},
}
"""Keys that are read from each list of the JSON, and their types."""


@dataclasses.dataclass(frozen=True)
class Scene:
    """An image file and its objects.

    Boxes `[n, 4]` are (x1, y1, x2, y2), labels `[n]` count from 1, an outline is COCO's or None.
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
    """The scenes of a split; `truth` is their annotation in COCO's JSON, for pycocotools."""

    scenes: tuple[Scene, ...]
    files: ImageFiles
    categories: dict[int, str]
    """COCO's numbers of the categories and their names; labels number these from 1."""
    counts: dict[str, int]
    """Numbers of images and boxes, and of what was left out, by reason."""
    truth: dict[str, Any]

    def __len__(self) -> int:
        return len(self.scenes)

    @property
    def has_outlines(self) -> bool:
        """True if every object has an outline."""
        return all(outline is not None for scene in self.scenes for outline in scene.outlines)

    def image(self, index: int) -> Tensor:
        """Read an image as uint8 `[3, height, width]`; ValueError if it is missing or broken."""
        return read_image(self.files, self.scenes[index].file)

    def masks(self, index: int) -> Tensor:
        """Return the objects of an image as masks of 0 and 1, `[n, height, width]`."""
        scene = self.scenes[index]
        masks = [filled(outline, scene.height, scene.width) for outline in scene.outlines]
        return torch.stack(masks) if masks else torch.zeros(0, scene.height, scene.width, dtype=torch.uint8)


class _Box(NamedTuple):
    corners: tuple[float, float, float, float]
    label: int
    outline: Any


def read_scenes(path: str | Path, files: ImageFiles, broken: Broken = "skip", empty: bool = True) -> Scenes:
    """Read COCO's JSON, and check everything except pixel data.

    Crowds (`iscrowd`) are in `truth` only: COCO's scores ignore boxes there.

    Args:
        path: The JSON file, plain, `.xz` or `.gz`.
        files: The images.
        broken: "skip" leaves out and counts unusable entries; "refuse" makes the first one an error.
        empty: Keep images without objects, from which a detector learns little.

    Raises:
        ValueError: If the file is not COCO's JSON, contradicts itself, or has no usable image.
    """
    path = Path(path)
    given = _parse(path)
    categories = {row["id"]: str(row["name"]) for row in sorted(given["categories"], key=lambda row: row["id"])}
    for key in KEYS["categories"]:
        (value, count), *_ = collections.Counter(row[key] for row in given["categories"]).most_common(1) or [("", 0)]
        if count > 1:
            raise ValueError(f"{path} lists {count} categories with the {key} {value!r}; give each its own")
    labels = {category: label for label, category in enumerate(categories, 1)}
    left_out: collections.Counter[str] = collections.Counter()

    def problem(what: str, where: str) -> None:
        if broken == "refuse":
            raise ValueError(f"{path}: {what}: {where}; broken=skip leaves these out and counts them")
        left_out[what] += 1

    by_image: dict[int, list[dict[str, Any]]] = {}
    images = {}
    for image in given["images"]:
        if image["id"] in images:
            problem("images listed twice", image["file_name"])
        elif why := _unusable(image, files):
            problem(*why)
        else:
            images[image["id"]] = image
            by_image[image["id"]] = []
    listed = {image["id"] for image in given["images"]}
    for annotation in given["annotations"]:
        if annotation["image_id"] not in listed or annotation["category_id"] not in labels:
            key = "image_id" if annotation["image_id"] not in listed else "category_id"
            raise ValueError(
                f"{path}: annotation {annotation.get('id')} has {key} {annotation[key]}, which the file does not list"
            )
        if annotation["image_id"] in by_image:
            by_image[annotation["image_id"]].append(annotation)

    scenes, truth = [], []
    for number, image in images.items():
        boxes, scored = _boxes(image, by_image[number], labels, problem, left_out)
        if not boxes and not empty:
            left_out["images without boxes"] += 1
            continue
        corners = torch.tensor([box.corners for box in boxes], dtype=torch.float32).view(-1, 4)
        classes = torch.tensor([box.label for box in boxes], dtype=torch.long)
        size = image["height"], image["width"]
        scenes.append(Scene(number, image["file_name"], *size, corners, classes, tuple(b.outline for b in boxes)))
        truth += scored
    if not scenes:
        reasons = ", ".join(f"{count} {what}" for what, count in sorted(left_out.items())) or "nothing"
        raise ValueError(f"{path} has no usable image; left out: {reasons}")
    counts = {
        "images": len(scenes),
        "boxes": sum(len(scene.labels) for scene in scenes),
        **dict(sorted(left_out.items())),
    }
    whole = {
        "images": [images[scene.number] for scene in scenes],
        "annotations": [{**row, "id": at} for at, row in enumerate(truth, 1)],  # id 0 means "not found" in pycocotools
        "categories": given["categories"],
    }
    return Scenes(tuple(scenes), files, categories, counts, whole)


def _parse(path: Path) -> dict[str, Any]:
    """Read the JSON and check the lists and keys that are used."""
    try:
        with open_bytes(path) as file:
            given = json.load(file)
    except (OSError, EOFError, ValueError, RecursionError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}; get it again") from None
    for part, keys in KEYS.items():
        rows = given.get(part) if isinstance(given, dict) else None
        if not isinstance(rows, list):
            raise ValueError(f"{path} is not COCO's JSON: it has no list {part!r}")
        for row in rows:
            missing = [key for key in keys if not isinstance(row, dict) or key not in row]
            if missing:
                raise ValueError(f"{path} is not COCO's JSON: a row of {part!r} has no {', '.join(missing)}")
            for key, kind in keys.items():
                if not isinstance(row[key], kind):
                    what = "a whole number" if kind is int else "text"
                    raise ValueError(
                        f"{path} is not COCO's JSON: a row of {part!r} has {key} = {row[key]!r}; needs {what}"
                    )
    return given


def _unusable(image: dict[str, Any], files: ImageFiles) -> tuple[str, str] | None:
    """Return the problem of an image and where it is, or None."""
    name = image["file_name"]
    if name not in files:
        return "missing images", f"{files.path} has no {name}"
    try:
        size = image_size(files, name)
    except ValueError as error:
        return "images that cannot be read", str(error)
    listed = image["width"], image["height"]
    if size != listed:
        return "images of another size", f"{name} is {size[0]} x {size[1]}, listed as {listed[0]} x {listed[1]}"
    return None


def _boxes(
    image: dict[str, Any], annotations: list[dict[str, Any]], labels: dict[int, int], problem: Any, out: Any
) -> tuple[list[_Box], list[dict[str, Any]]]:
    """Return the usable boxes of an image, and the annotations to score against."""
    found: dict[tuple, _Box] = {}
    scored = []
    width, height = image["width"], image["height"]
    for annotation in annotations:
        where = f"annotation {annotation.get('id')} of {image['file_name']}"
        box = annotation["bbox"]
        if not (isinstance(box, list) and len(box) == 4 and all(map(finite, box))):
            problem("boxes that are not four numbers", f"{where} has {box}")
            continue
        if not drawable(annotation.get("segmentation"), height, width):
            problem("outlines that cannot be drawn", where)
            continue
        scored.append(_scored(annotation, width, height))
        if annotation.get("iscrowd"):
            out["crowds"] += 1
            continue
        x, y, w, h = box
        corners = max(x, 0.0), max(y, 0.0), min(x + w, width), min(y + h, height)
        over = max(-x, -y, x + w - width, y + h - height)
        if w < LEAST or h < LEAST:
            problem("boxes without area", f"{where} is {w} x {h}")
        elif corners[2] - corners[0] < LEAST or corners[3] - corners[1] < LEAST:
            problem("boxes outside their image", f"{where} is at {box} of {width} x {height}")
        elif (key := (*corners, annotation["category_id"])) in found:
            problem("boxes given twice", f"{where} repeats {box}")
        else:
            if over > SLACK:
                problem("boxes cut at the edge", f"{where} is at {box} of {width} x {height}")
            found[key] = _Box(corners, labels[annotation["category_id"]], annotation.get("segmentation") or None)
    return list(found.values()), scored


def _scored(annotation: dict[str, Any], width: int, height: int) -> dict[str, Any]:
    """Return an annotation with all keys that pycocotools reads; crowds may lack an outline."""
    x, y, w, h = annotation["bbox"]
    area = annotation["area"] if finite(annotation.get("area")) else w * h
    left, right = (min(max(at, 0), width) for at in (x, x + w))
    top, bottom = (min(max(at, 0), height) for at in (y, y + h))
    outline = annotation.get("segmentation") or [[left, top, right, top, right, bottom, left, bottom]]
    return {**annotation, "iscrowd": int(bool(annotation.get("iscrowd"))), "area": area, "segmentation": outline}
