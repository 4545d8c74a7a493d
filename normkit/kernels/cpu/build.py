"""Compilation of the C++ kernels for this machine, on first use, into the cache folder."""

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

SOURCES = Path(__file__).parent
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
TIMEOUT = 300  # seconds; compilation takes about 3

_lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The loaded library, or None; `obstacle` has the reason."""
    with _lock:
        return _load()[0]


def obstacle() -> str:
    """The reason why there are no C++ kernels; empty if there are."""
    with _lock:
        return _load()[1]


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    if sys.platform != "linux":
        return None, f"the C++ kernels need Linux; this is {sys.platform}"
    compiler = _compiler()
    if not compiler:
        return None, "there is no C++ compiler: install g++, or name one in CXX"
    from normkit.files import cache_folder

    name = f"kernels-{_key(compiler)}.so"
    try:
        folder = _private(cache_folder() / "native")
        if not (folder / name).exists():
            _compile(compiler, folder / name)
        return ctypes.CDLL(str(folder / name)), ""
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        why = f"{compiler[0]} could not compile the C++ kernels: {output.strip()[-500:]}"
        warnings.warn(f"normkit: {why}. PyTorch's slower kernels run instead", RuntimeWarning, stacklevel=2)
        return None, why


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    found = (shutil.which(name) for name in ([given[0]] if given else ["g++", "c++", "clang++"]))
    first = next((path for path in found if path), None)
    return [first, *given[1:]] if first else []


def _key(compiler: list[str]) -> str:
    """Hash of sources, flags, compiler and processor: machines may share a home folder."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf8", errors="replace").split("\n\n")[0].splitlines()
    processor = [line for line in about if line.lower().startswith(("flags", "features", "model name", "cpu part"))]
    sources = [path.read_text(encoding="utf8") for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")])]
    parts = [*sources, *FLAGS, *compiler, platform.machine(), *processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _private(folder: Path) -> Path:
    """The folder, created if missing; a new temporary one if others can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        ours = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if ours and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="normkit-"))


def _compile(compiler: list[str], path: Path) -> None:
    """Compile into a temporary folder and move the result.

    Other processes never find half a file. The library is linked with the OpenMP that came with PyTorch, so that both
    use the same threads.
    """
    openmp = [str(path) for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*.so*"))[:1]]
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        made = Path(place) / path.name
        command = [*compiler, *FLAGS, str(SOURCES / "kernels.cpp"), "-o", str(made), *openmp, "-Wl,--as-needed"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
        made.replace(path)
