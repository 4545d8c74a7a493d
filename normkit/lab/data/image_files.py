"""Files of pictures by name, in a folder or in a tar archive that stays packed; what is wrong with a picture."""

import io
import tarfile
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
TAIL = 64  # bytes at the end of a file in which its mark of the end stands


class Files:
    """The files of a folder, or of a tar archive, by their names; ValueError where there is neither."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._places: dict[str, tuple[int, int]] | None = None  # in the archive: offset and size
        if self.path.is_file():
            try:
                with tarfile.open(self.path, "r:") as archive:
                    self._places = {
                        member.name.removeprefix("./"): (member.offset_data, member.size)
                        for member in archive
                        if member.isfile()
                    }
            except (tarfile.TarError, EOFError, OSError) as error:
                raise ValueError(f"{self.path} is no tar archive, or is cut short: {error}") from None
        elif not self.path.is_dir():
            raise ValueError(f"there is no folder and no tar archive {self.path}")

    def __contains__(self, name: str) -> bool:
        if self._places is None:
            return (self.path / name).is_file()
        return name in self._places

    def open(self, name: str) -> BinaryIO:
        """A file's content; OSError where it is not there."""
        if self._places is None:
            return (self.path / name).open("rb")
        if name not in self._places:
            raise FileNotFoundError(f"{self.path} has no {name}")
        offset, size = self._places[name]
        with self.path.open("rb") as archive:
            archive.seek(offset)
            return io.BytesIO(archive.read(size))


def size_of(files: Files, name: str) -> tuple[int, int]:
    """Width and height of a picture, from its head; ValueError, saying why, where it cannot be shown.

    Pixels are only decoded where the file does not end as its kind should.
    """
    from PIL import Image

    try:
        with files.open(name) as file, Image.open(file) as picture:
            size = picture.size
            file.seek(0, io.SEEK_END)
            file.seek(-min(TAIL, file.tell()), io.SEEK_END)
            whole = ENDS.get(picture.format or "", b"") in file.read()
        if not whole:
            pixels(files, name)
    except (OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read: {_said(error)}") from None
    return size


def pixels(files: Files, name: str) -> Tensor:
    """A picture as bytes `[3, height, width]`; grey ones and those with a palette become red, green and blue.

    ValueError, saying why, where it is missing, cut short or damaged.
    """
    import numpy as np
    from PIL import Image

    try:
        with files.open(name) as file, Image.open(file) as picture:
            values = np.array(picture.convert("RGB"))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read: {_said(error)}") from None
    return torch.from_numpy(values).permute(2, 0, 1)


def _said(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    text = str(error)
    return "it is no picture of a known kind" if text.startswith("cannot identify") else text
