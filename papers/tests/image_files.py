"""Tiny image data sets in all formats: each class has its colour, on noise."""

import io
import json
import lzma
import pathlib
import tarfile

import numpy as np

COLOURS = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200]])


def pixels(count: int, classes: int = 3, size: int = 32, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    chance = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    noise = chance.integers(-40, 40, (count, size, size, 3))
    return np.clip(COLOURS[labels % 3][:, None, None] + noise, 0, 255).astype(np.uint8), labels


def png(picture: np.ndarray) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def files(count: int, seed: int = 0) -> list[tuple[str, bytes, int]]:
    made, labels = pixels(count, seed=seed, size=20)
    return [(f"{number:04d}", png(picture), int(labels[number])) for number, picture in enumerate(made)]


def write_folder(folder: pathlib.Path, train: int = 24, val: int = 9) -> pathlib.Path:
    for split, count, seed in (("train", train, 0), ("val", val, 1)):
        for key, content, label in files(count, seed):
            path = folder / split / f"class{label}" / f"{key}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    return folder


def write_tar(path: pathlib.Path, samples: list[tuple[str, bytes, int]], kind: str = "cls") -> pathlib.Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        for key, content, label in samples:
            text = str(label) if kind == "cls" else json.dumps({"label": label})
            for name, data in ((f"{key}.png", content), (f"{key}.{kind}", text.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


def write_parquet(
    path: pathlib.Path, samples: list[tuple[str, bytes, int]], image: str = "image", label: str = "label"
) -> pathlib.Path:
    import datasets

    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": content, "path": f"{key}.png"} for key, content, _ in samples]
    rows = datasets.Dataset.from_dict({image: images, label: [label for *_, label in samples]})
    rows.cast_column(image, datasets.Image(decode=False)).to_parquet(path)
    return path


def pack(path: pathlib.Path, made: np.ndarray) -> None:
    """As differences under xz, the inverse of what the reader does."""
    red, green, blue = made.transpose(3, 0, 1, 2)
    planes = np.stack([green, red - green, blue - green])
    planes = np.diff(planes, axis=3, prepend=np.zeros((3, len(made), 32, 1), np.uint8))
    planes = np.diff(planes, axis=2, prepend=np.zeros((3, len(made), 1, 32), np.uint8))
    path.write_bytes(lzma.compress(planes.astype(np.uint8).tobytes()))
