"""Atomic writes: a file is written beside the old one, then replaces it. The cache folder."""

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path:
    """Return the cache folder: `NORMKIT_CACHE`, or `~/.cache/normkit`.

    Raises:
        OSError: If there is neither, as for a user without a home.
    """
    try:
        return Path(os.environ.get("NORMKIT_CACHE") or Path.home() / ".cache" / "normkit")
    except RuntimeError:  # HOME is not set and the system does not know the user, as in some containers
        raise OSError("there is no home folder for the cache; set HOME, or NORMKIT_CACHE to a folder") from None


def write_whole(path: Path, data: bytes) -> Path:
    """Write a file atomically: after a crash `path` holds all old bytes or all new ones.

    Raises:
        OSError: if the file cannot be written (no space left, no permission); the old one is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.{os.getpid()}")  # containers have equal numbers
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)
        raise
    with contextlib.suppress(OSError):  # where the system can do it, the new name survives a power cut, too
        directory = os.open(path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
    return path


def open_regular(path: str | Path) -> BinaryIO:
    """Open a file for reading in binary, without ever waiting for a writer.

    Opening a named pipe would wait until another process writes to it, and a device may never end.

    Raises:
        ValueError: if the path is no regular file but, for example, a named pipe.
        OSError: if the file cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is not a regular file")
    return os.fdopen(descriptor, "rb")
