"""Pictures in shards: tar archives as WebDataset has them, and Parquet as Hugging Face has it; read in any order.

A tar archive is gone through once, for where each picture begins and what class it has; that list is kept in the cache
(`NORMKIT_CACHE`). After that a picture is one read of a file, in whatever order training asks for. Parquet is packed by
row groups, so pictures of a group are read together, and the groups read last are kept in memory.
"""

import collections
import functools
import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from normkit.files import cache_folder, write_whole
from normkit.lab.data.image_folder import SUFFIXES, WINDOW

FORMAT = 1
BLOCK = 512  # bytes, of a tar archive
Tell = Callable[[str], object]


class Tars:
    """Shards of WebDataset: a sample is the files of one KEY: KEY.jpg, and KEY.cls (a number) or KEY.json (a "label").

    What is wrong with a shard is added to `notes`: that it is cut short, that pictures have no class.
    """

    groups = None

    def __init__(self, paths: Sequence[Path], notes: list[str], tell: Tell = lambda said: None):
        self.paths = list(paths)
        parts = [_indexed(path, notes, tell) for path in self.paths]
        self.shard = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        self.offset, self.size, self.labels = np.concatenate(parts).T

    def name(self, item: int) -> str:
        """The shard and where in it."""
        return f"the picture at byte {self.offset[item]} of {self.paths[self.shard[item]]}"

    def raw(self, item: int) -> bytes:
        """The content of the file."""
        with self.paths[self.shard[item]].open("rb") as file:
            file.seek(int(self.offset[item]))
            return file.read(int(self.size[item]))


def _indexed(path: Path, notes: list[str], tell: Tell) -> np.ndarray:
    """Offset, size and class of each picture of a tar archive `[N, 3]`, from the cache where it is there."""
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
    tell(f"listing {path.name}")
    table, said = _scan(path)
    notes += said
    packed = io.BytesIO()
    np.savez(packed, table=table, notes=np.array(said, dtype=np.str_))
    write_whole(kept, packed.getvalue())
    return table


def _scan(path: Path) -> tuple[np.ndarray, list[str]]:
    places: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    said: list[str] = []
    end = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, end - BLOCK))
        whole = not any(file.read())  # an archive ends with blocks of zeros; tarfile says nothing where they lack
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                folder, _, file = member.name.rpartition("/")
                key, _, kind = file.partition(".")
                key = f"{folder}/{key}"
                if not member.isfile() or member.offset_data + member.size > end:
                    continue
                if f".{kind.lower()}" in SUFFIXES:
                    places[key] = member.offset_data, member.size
                elif kind in ("cls", "json") and (content := archive.extractfile(member)) is not None:
                    labels[key] = _label(kind, content.read(), f"{member.name} of {path}")
    except (tarfile.TarError, EOFError, OSError) as error:
        if not places:
            raise ValueError(f"{path} is no tar archive, or is cut short: {error}; get it again") from None
        whole = False
    if places and not whole:
        said.append(f"{path} is cut short after {len(places):,} pictures")
    bare = [key for key in places if key not in labels]
    if len(bare) == len(places):
        raise ValueError(f"{path} has no picture with a class; needs KEY.jpg beside KEY.cls or KEY.json")
    if bare:
        said.append(f"{path} has {len(bare):,} pictures without a class, the first of them {bare[0].lstrip('/')}")
    rows = [(*places[key], labels[key]) for key in places if key in labels]
    return np.array(rows, np.int64), said


def _label(kind: str, content: bytes, name: str) -> int:
    try:
        return int(content) if kind == "cls" else int(json.loads(content)["label"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{name} does not say a class; needs a number, or JSON with a number as its label") from None


class Rows:
    """Parquet files with a column `image`, the bytes of files or structs with such `bytes`, and a column `label`."""

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
        """The file and the row."""
        shard, group, row = self.places[item]
        return f"row {row} of row group {group} of {self.paths[shard]}"

    def raw(self, item: int) -> bytes:
        """The content of the picture's file; ValueError where there is none."""
        shard, group, row = map(int, self.places[item])
        if (shard, group) not in self._read:
            with _opened(self.paths[shard]) as file:
                self._read[shard, group] = file.read_row_group(group, columns=["image"])["image"].to_pylist()
            while len(self._read) > WINDOW:
                self._read.popitem(last=False)
        found = self._read[shard, group][row]
        content = found.get("bytes") if isinstance(found, dict) else found
        if not content:
            raise ValueError("the row has no bytes")
        return content


def _labels(file: Any, path: Path) -> np.ndarray:
    try:
        found = file.read(columns=["label"])["label"].to_numpy()
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is cut short or damaged: {str(error).splitlines()[0]}") from None
    if found.dtype.kind not in "iu":  # text, or numbers some of which are missing
        raise ValueError(f"{path} does not say a class in every row; its column label needs whole numbers")
    return found


def _opened(path: Path) -> Any:
    """A Parquet file; ValueError where it is none, or lacks a column."""
    parquet = _parquet()
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no Parquet file, or is cut short: {str(error).splitlines()[0]}") from None
    lacking = {"image", "label"} - set(file.schema_arrow.names)
    if lacking:
        file.close()
        raise ValueError(f"{path} lacks the column {' and '.join(sorted(lacking))}; it has {file.schema_arrow.names}")
    return file


@functools.cache
def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ModuleNotFoundError("pictures in Parquet need pyarrow: pip install 'normkit[vision]'") from None
    return pyarrow.parquet
