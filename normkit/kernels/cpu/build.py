"""The C++ kernels as a library: compiled for this machine on first use, kept in the cache folder, loaded."""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path

import torch

from normkit.files import cache_folder

SOURCE = Path(__file__).with_name("kernels.cpp")
INCLUDED = ("walks.h", "columns.h", "rows.h", "rules.h")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
PATIENCE = 300  # seconds; it takes 3

_lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The kernels, or None where there are none; `obstacle` says why."""
    return _found()[0]


def obstacle() -> str:
    """Why there are no kernels; empty where there are."""
    return _found()[1]


def _found() -> tuple[ctypes.CDLL | None, str]:
    with _lock:
        return _load()


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if sys.platform != "linux":
        return None, f"they are for Linux, and this is {sys.platform}"
    compiler = _compiler()
    if not compiler:
        return None, "there is no C++ compiler: install g++, or name one in CXX"
    name = f"kernels-{_key(compiler)}.so"
    try:
        folder = _private(cache_folder() / "native")
        if not (folder / name).exists():
            _compile(compiler, folder / name)
        return ctypes.CDLL(str(folder / name)), ""
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        why = f"{compiler[0]} could not make them: {said.strip()[-500:]}"
        warnings.warn(f"normkit's kernels for CPUs: {why}. PyTorch's run instead, slower", RuntimeWarning, stacklevel=2)
        return None, why


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    there = (shutil.which(name) for name in ([given[0]] if given else ["g++", "c++", "clang++"]))
    first = next((path for path in there if path), None)
    return [first, *given[1:]] if first else []


def _key(compiler: list[str]) -> str:
    """One library for each source, compiler and processor: a home folder may be that of many machines."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf8", errors="replace").split("\n\n")[0].splitlines()
    same = [line for line in about if line.lower().startswith(("flags", "features", "model name", "cpu part"))]
    sources = [path.read_text(encoding="utf8") for path in (SOURCE, *map(SOURCE.with_name, INCLUDED))]
    told = [*sources, *FLAGS, *compiler, platform.machine(), *same]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:24]


def _private(folder: Path) -> Path:
    """The folder, made where it is missing; one of this process alone where others could put a library into it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = folder.stat()
        ours = seen.st_uid == os.getuid() and not seen.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if ours and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="normkit-"))


def _compile(compiler: list[str], path: Path) -> None:
    """Compile beside the place and move there: another process finds all of it or nothing.

    Linked with the OpenMP that came with PyTorch, so that both have the same threads.
    """
    threads = sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        made = Path(place) / path.name
        words = [*compiler, *FLAGS, str(SOURCE), "-o", str(made), *map(str, threads[:1]), "-Wl,--as-needed"]
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE)
        made.replace(path)
