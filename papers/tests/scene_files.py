"""A tiny data set in COCO's form.

Coloured rectangles, discs cut out of polygons, on noise.
"""

import io
import json
import lzma
import pathlib
import tarfile

import numpy as np

KINDS = [{"id": 3, "name": "box"}, {"id": 7, "name": "bar"}]


def picture(width: int, height: int, boxes: list, seed: int) -> np.ndarray:
    pixels = np.random.default_rng(seed).integers(0, 60, (height, width, 3), dtype=np.uint8)
    for (x, y, w, h), kind in boxes:
        pixels[y : y + h, x : x + w, 0 if kind == 3 else 2] = 250
    return pixels


def scenes(count: int, seed: int = 0) -> tuple[dict, dict[str, bytes]]:
    """COCO's JSON and the files of so many pictures, of two shapes, one to three things each."""
    from PIL import Image

    chance = np.random.default_rng(seed)
    images, notes, files = [], [], {}
    for number in range(1, count + 1):
        width, height = ((80, 60), (64, 88))[number % 2]
        boxes = []
        for _ in range(int(chance.integers(1, 4))):
            kind = int(chance.choice([3, 7]))
            w, h = (24, 20) if kind == 3 else (12, 40)
            boxes.append(([int(chance.integers(0, width - w)), int(chance.integers(0, height - h)), w, h], kind))
        name, buffer = f"{number:03d}.png", io.BytesIO()
        Image.fromarray(picture(width, height, boxes, seed + number)).save(buffer, "PNG")
        files[name] = buffer.getvalue()
        images.append({"id": number, "file_name": name, "width": width, "height": height})
        for box, kind in boxes:
            x, y, w, h = box
            ring = [float(v) for v in (x, y, x + w, y, x + w, y + h, x, y + h)]
            notes.append({"id": len(notes), "image_id": number, "category_id": kind, "bbox": box, "area": w * h,
                          "iscrowd": 0, "segmentation": [ring]})  # fmt: skip
    return {"images": images, "annotations": notes, "categories": [dict(kind) for kind in KINDS]}, files


def write(folder: pathlib.Path, given: dict, files: dict[str, bytes], name: str, packed: bool = False) -> None:
    """One split: its JSON, and its pictures in `images`, or packed with xz and tar."""
    folder.mkdir(exist_ok=True, parents=True)
    text = json.dumps(given).encode()
    if not packed:
        (folder / f"{name}.json").write_bytes(text)
        (folder / "images").mkdir(exist_ok=True)
        for file, content in files.items():
            (folder / "images" / file).write_bytes(content)
        return
    (folder / f"{name}.json.xz").write_bytes(lzma.compress(text))
    with tarfile.open(folder / "images.tar", "w") as archive:
        for file, content in files.items():
            member = tarfile.TarInfo(f"./{file}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def data_set(folder: pathlib.Path, count: int = 6) -> pathlib.Path:
    """A folder that task detection takes; train and valid are the same pictures."""
    given, files = scenes(count)
    write(folder, given, files, "train")
    write(folder, given, files, "valid")
    return folder
