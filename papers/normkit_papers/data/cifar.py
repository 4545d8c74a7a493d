"""CIFAR-10 and CIFAR-100 in their binary version, or compressed as differences.

Nothing is unpickled.

| format | CIFAR-10 | CIFAR-100 |
|---|---|---|
| binary | data_batch_1.bin ... 5, test_batch.bin, batches.meta.txt | train.bin, test.bin, fine_label_names.txt |
| compressed | data_batch_1.grad.xz ... 5, test_batch.grad.xz, train_labels.npy, test_labels.npy, label_names.txt | |

A record of the binary version is one byte for the class (CIFAR-100: two, the second is the fine class) and 3072 bytes
for the image, planes of red, green and blue. Compressed images are three planes (G, R - G, B - G), each the 2-D
difference of the plane, modulo 256. The "python version" consists of pickles: get the binary one.
"""

import lzma
from pathlib import Path

import numpy as np

from normkit_papers.data.image_folder import ImageArray

PIXELS = 3 * 32 * 32
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
PYTHON_VERSION = ("data_batch_1", "train", "meta", "batches.meta")


def read_cifar(folder: Path, classes: int) -> tuple[ImageArray, ImageArray, list[str]]:
    """Read training images, test images and the names of the classes from a folder.

    Raises:
        ValueError: If files are missing, cut short, or have other classes.
    """
    binary = {10: (tuple(f"{batch}.bin" for batch in BATCHES), "test_batch.bin", "batches.meta.txt"),
              100: (("train.bin",), "test.bin", "fine_label_names.txt")}  # fmt: skip
    train, test, names = binary[classes]
    if classes == 10 and (folder / f"{BATCHES[0]}.grad.xz").is_file():
        compressed = tuple(f"{batch}.grad.xz" for batch in BATCHES)
        _require_files(
            folder, (*compressed, "test_batch.grad.xz", "train_labels.npy", "test_labels.npy", "label_names.txt")
        )
        parts = [
            ImageArray(
                np.concatenate([_decompress(folder / file) for file in files]), _labels(folder / labels), str(folder)
            )
            for files, labels in ((compressed, "train_labels.npy"), (("test_batch.grad.xz",), "test_labels.npy"))
        ]
        names_file = folder / "label_names.txt"
    else:
        _require_files(folder, (*train, test, names))
        parts = [_binary([folder / file for file in files], classes) for files in (train, (test,))]
        names_file = folder / names
    found = names_file.read_text(encoding="utf8").split()
    if len(found) != classes:
        raise ValueError(f"{names_file} has {len(found)} names of classes; needs {classes}")
    for part in parts:
        if len(wrong := part.labels[(part.labels < 0) | (part.labels >= classes)]):
            raise ValueError(f"{part.origin} has a class {wrong[0]}; needs classes from 0 to {classes - 1}")
    return parts[0], parts[1], found


def _require_files(folder: Path, files: tuple[str, ...]) -> None:
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        pickles = any((folder / file).is_file() for file in PYTHON_VERSION)
        hint = "; there is the python version, pickles, which are never opened here" if pickles else ""
        raise ValueError(f"{folder} lacks {', '.join(missing)}{hint}")


def _binary(paths: list[Path], classes: int) -> ImageArray:
    head = 1 if classes == 10 else 2
    records = []
    for path in paths:
        flat = np.fromfile(path, np.uint8)
        if not len(flat) or len(flat) % (head + PIXELS):
            raise ValueError(
                f"{path} is cut short: {len(flat):,} bytes, not a multiple of {head + PIXELS}; get it again"
            )
        records.append(flat.reshape(-1, head + PIXELS))
    whole = np.concatenate(records)
    pixels = np.ascontiguousarray(whole[:, head:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    return ImageArray(pixels, whole[:, head - 1], str(paths[0].parent))


def _decompress(path: Path) -> np.ndarray:
    try:
        with lzma.open(path) as file:
            planes = np.frombuffer(file.read(), np.uint8).reshape(3, -1, 32, 32)
    except (EOFError, lzma.LZMAError, ValueError) as error:
        raise ValueError(f"{path} is cut short or damaged: {error}; get it again") from None
    planes = planes.cumsum(2, dtype=np.uint8).cumsum(3, dtype=np.uint8)
    planes[1:] += planes[0]
    return np.ascontiguousarray(planes[[1, 0, 2]].transpose(1, 2, 3, 0))


def _labels(path: Path) -> np.ndarray:
    try:
        labels = np.load(path, allow_pickle=False)
        if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
            raise ValueError("it needs one whole number for each image")
        return labels
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not an array of labels: {error}") from None
