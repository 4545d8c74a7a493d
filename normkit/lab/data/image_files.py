"""Image files by name, in a folder or in an uncompressed tar archive."""

import io
import os
import tarfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
TAIL = 64  # bytes at the end of a file that contain its end marker


class ImageFiles:
    """The files of a folder or of a tar archive, by name; ValueError if there is neither.

    A name that leads out of the folder counts as missing: it comes from a file that others wrote.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._offsets: dict[str, tuple[int, int]] | None = None  # offset and size in the archive
        if self.path.is_file():
            try:
                with tarfile.open(self.path, "r:") as archive:
                    self._offsets = {
                        member.name.removeprefix("./"): (member.offset_data, member.size)
                        for member in archive
                        if member.isfile()
                    }
            except (tarfile.TarError, EOFError, OSError) as error:
                raise ValueError(f"{self.path} is not a tar archive, or is cut short: {error}") from None
        elif not self.path.is_dir():
            raise ValueError(f"there is no folder and no tar archive {self.path}")

    def __contains__(self, name: str) -> bool:
        if self._offsets is None:
            inside = not (Path(name).is_absolute() or ".." in Path(name).parts)
            return inside and os.path.isfile(self.path / name)  # noqa: PTH113  for names that are too long
        return name in self._offsets

    def open(self, name: str) -> BinaryIO:
        """Open a file; OSError if it is missing."""
        if name not in self:
            raise FileNotFoundError(f"{self.path} has no {name}")
        if self._offsets is None:
            return (self.path / name).open("rb")
        offset, size = self._offsets[name]
        with self.path.open("rb") as archive:
            archive.seek(offset)
            return io.BytesIO(archive.read(size))


def image_size(files: ImageFiles, name: str) -> tuple[int, int]:
    """Return width and height of an image from its header; ValueError if it cannot be read.

    Pixels are decoded only if the file does not end with the marker of its format.
    """
    from PIL import Image

    try:
        with files.open(name) as file, Image.open(file) as image:
            size = image.size
            file.seek(0, io.SEEK_END)
            file.seek(-min(TAIL, file.tell()), io.SEEK_END)
            whole = ENDS.get(image.format or "", b"") in file.read()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read: {_reason(error)}") from None
    if not whole:
        read_image(files, name)
    return size


def read_image(files: ImageFiles, name: str) -> Tensor:
    """Read an image as uint8 RGB `[3, height, width]`; ValueError if missing or damaged."""
    import numpy as np
    from PIL import Image

    try:
        with files.open(name) as file, Image.open(file) as image:
            values = np.array(to_rgb(image))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise ValueError(f"{name} cannot be read: {_reason(error)}") from None
    return torch.from_numpy(values).permute(2, 0, 1)


def to_rgb(image: Any) -> Any:
    """Convert an image of PIL to RGB.

    Raises:
        ValueError: If pixels have more than 8 bits, of which PIL would clip nearly all to white.
    """
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}); scale them to 8 bits")
    return image.convert("RGB")


def _reason(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    text = str(error)
    return "it is not an image of a known format" if text.startswith("cannot identify") else text
