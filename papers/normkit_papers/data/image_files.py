"""Image files by name, in a folder or in an uncompressed tar archive."""

import contextlib
import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND"}
TAIL = 64  # bytes at the end of a file that contain its end marker


class Broken(ValueError):
    """An image that cannot be read; the message has its name and the reason."""


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
            raise FileNotFoundError("it is missing")
        if self._offsets is None:
            return (self.path / name).open("rb")
        offset, size = self._offsets[name]
        with self.path.open("rb") as archive:
            archive.seek(offset)
            return io.BytesIO(archive.read(size))


def image_size(files: ImageFiles, name: str) -> tuple[int, int]:
    """Return width and height of an image from its header; `Broken` if it cannot be read.

    Pixels are decoded only if the file does not end with the marker of its format, or the format has none.
    """
    from PIL import Image

    with reading(name), files.open(name) as file, Image.open(file) as image:
        size = image.size
        file.seek(0, io.SEEK_END)
        file.seek(-min(TAIL, file.tell()), io.SEEK_END)
        whole = image.format in ENDS and ENDS[image.format] in file.read()
    if not whole:
        read_image(files, name)
    return size


def read_image(files: ImageFiles, name: str) -> Tensor:
    """Read an image as uint8 RGB `[3, height, width]`; `Broken` if it cannot be read."""
    import numpy as np
    from PIL import Image

    with reading(name), files.open(name) as file, Image.open(file) as image:
        values = np.array(to_rgb(image))
    return torch.from_numpy(values).permute(2, 0, 1)


def to_rgb(image: Any) -> Any:
    """Convert an image of PIL to RGB.

    Raises:
        ValueError: If pixels have more than 8 bits, of which PIL would clip nearly all to white.
    """
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 8 bits (mode {image.mode}); scale them to 8 bits")
    return image.convert("RGB")


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Raise `Broken` if the image of this name cannot be read in the block."""
    from PIL import Image, UnidentifiedImageError

    try:
        yield
    except UnidentifiedImageError:  # its message has a memory address
        raise Broken(f"{name} cannot be read: it is not an image of a known format") from None
    except (OSError, ValueError, SyntaxError, NotImplementedError, Image.DecompressionBombError) as error:
        file = getattr(error, "filename", None)
        what = str(error).replace(str(file), "it") if file else str(error)
        raise Broken(f"{name} cannot be read: {what or type(error).__name__}") from None
