"""Images in shards: tar archives in WebDataset's format, Parquet in Hugging Face's.

A tar archive is listed once. The offset and class of each image are kept in the cache (`NORMKIT_CACHE`), so that an
image is one read of a file. Parquet is compressed by row groups: images of a group are read together, and the groups
read last are kept in memory.
"""

import collections
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normkit._util import cache_folder, write_whole
from normkit_papers.data import OnStage
from normkit_papers.data.image_folder import SUFFIXES, WINDOW

FORMAT = 1
BLOCK = 512  # bytes, of a tar archive
DAMAGED = (OSError, ValueError, NotImplementedError)  # errors of Parquet; the last for unknown codecs and types


class Tars:
    """Shards in WebDataset's format: KEY.jpg beside KEY.cls or KEY.json.

    KEY.cls has a number, KEY.json a "label". Problems are added to `notes`: shards that are cut short, images without a
    class.
    """

    groups = None

    def __init__(self, paths: Sequence[Path], notes: list[str], on_stage: OnStage = lambda stage: None):
        self.paths = list(paths)
        parts = [_list_images(path, notes, on_stage) for path in self.paths]
        self.shard = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        self.offset, self.size, self.labels = np.concatenate(parts).T

    def name(self, item: int) -> str:
        """Return the shard and the offset of an image."""
        return f"the image at byte {self.offset[item]} of {self.paths[self.shard[item]]}"

    def raw(self, item: int) -> bytes:
        """Return the content of an image file."""
        with self.paths[self.shard[item]].open("rb") as file:
            file.seek(int(self.offset[item]))
            return file.read(int(self.size[item]))


def _list_images(path: Path, notes: list[str], on_stage: OnStage) -> np.ndarray:
    """Return offset, size and class `[n, 3]` of the images of a tar archive; cached."""
    stat = path.stat()
    mark = f"{FORMAT} {path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    cache = cache_folder() / "shards"
    kept = cache / f"{hashlib.sha256(mark.encode()).hexdigest()[:24]}.npz"
    try:
        with np.load(kept, allow_pickle=False) as saved:
            notes += saved["notes"].tolist()
            return saved["table"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass
    on_stage(f"listing {path.name}")
    table, problems = _scan(path)
    notes += problems
    buffer = io.BytesIO()
    np.savez(buffer, table=table, notes=np.array(problems, dtype=np.str_))
    write_whole(kept, buffer.getvalue())
    return table


def _scan(path: Path) -> tuple[np.ndarray, list[str]]:
    offsets: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    problems: list[str] = []
    end = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, end - BLOCK))
        whole = not any(file.read())  # an archive ends with blocks of zeros; tarfile ignores that they are missing
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, file = member.name.rpartition("/")
                key, _, kind = file.partition(".")
                key = f"{folder}/{key}"
                if not member.isfile() or member.offset_data + member.size > end:
                    continue
                if f".{kind.lower()}" in SUFFIXES:
                    offsets[key] = member.offset_data, member.size
                elif kind in ("cls", "json") and (content := archive.extractfile(member)) is not None:
                    label = _label(kind, content.read(), f"{member.name} of {path}")
                    labels |= {} if label is None else {key: label}
    except (tarfile.TarError, EOFError, OSError) as error:
        if not offsets:
            raise ValueError(f"{path} is not a tar archive, or is cut short: {error}; get it again") from None
        whole = False
    if offsets and not whole:
        problems.append(f"{path} is cut short after {len(offsets):,} images")
    bare = [key for key in offsets if key not in labels]
    if len(bare) == len(offsets):
        raise ValueError(f"{path} has no image with a class; needs KEY.jpg beside KEY.cls or KEY.json")
    if bare:
        problems.append(f"{path} has {len(bare):,} images without a class, the first of them {bare[0].lstrip('/')}")
    rows = [(*offsets[key], labels[key]) for key in offsets if key in labels]
    return np.array(rows, np.int64), problems


def _label(kind: str, content: bytes, name: str) -> int | None:
    """Return a class; None for JSON of something else, as it may be beside KEY.cls."""
    try:
        given = content if kind == "cls" else json.loads(content)
        if isinstance(given, dict):
            given = given.get("label")
        if isinstance(given, float) and not given.is_integer():
            raise ValueError
        return None if given is None else int(np.int64(int(given)))
    except (ValueError, TypeError, OverflowError, RecursionError):
        raise ValueError(f"{name} has no class; needs a whole number, or JSON with one as its label") from None


class Rows:
    """Parquet files with columns `label` and `image` (bytes, or a struct with `bytes`)."""

    def __init__(self, paths: Sequence[Path]):
        self.paths, labels, places = list(paths), [], []
        for shard, path in enumerate(self.paths):
            with _opened(path) as file:
                labels.append(_labels(file, path))
                sizes = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
            places += [(shard, number, row) for number, size in enumerate(sizes) for row in range(size)]
        self.labels = np.concatenate(labels).astype(np.int64)
        self.places = np.array(places, np.int64).reshape(-1, 3)
        first = self.places[:, 2] == 0
        self.groups = np.cumsum(first) - 1
        self._read: collections.OrderedDict[tuple[int, int], list] = collections.OrderedDict()

    def name(self, item: int) -> str:
        """Return the file and the row of an image."""
        shard, group, row = self.places[item]
        return f"row {row} of row group {group} of {self.paths[shard]}"

    def raw(self, item: int) -> bytes:
        """Return the content of an image file; ValueError if the row has none."""
        shard, group, row = map(int, self.places[item])
        if (shard, group) not in self._read:
            with _opened(self.paths[shard]) as file:
                self._read[shard, group] = file.read_row_group(group, columns=["image"])["image"].to_pylist()
            while len(self._read) > WINDOW:
                self._read.popitem(last=False)
        found = self._read[shard, group][row]
        content = found.get("bytes") if isinstance(found, dict) else found
        if not isinstance(content, bytes) or not content:
            raise ValueError("the row has no bytes")
        return content


def _labels(file: Any, path: Path) -> np.ndarray:
    try:
        found = file.read(columns=["label"])["label"].to_numpy()
    except DAMAGED as error:
        raise ValueError(f"{path} is cut short or damaged: {str(error).splitlines()[0]}") from None
    if found.dtype.kind not in "iu":  # text, or numbers some of which are missing
        raise ValueError(f"{path} has no class in some row; its column label needs whole numbers")
    return found


def _opened(path: Path) -> Any:
    """Open a Parquet file; ValueError if it is damaged or lacks a column."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise ModuleNotFoundError("images in Parquet need pyarrow: pip install 'normkit[vision]'") from None
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
    except DAMAGED as error:
        raise ValueError(f"{path} is not a Parquet file, or is cut short: {str(error).splitlines()[0]}") from None
    missing = {"image", "label"} - set(names)
    if missing:
        file.close()
        raise ValueError(f"{path} lacks the column {' and '.join(sorted(missing))}; it has {names}")
    return file
