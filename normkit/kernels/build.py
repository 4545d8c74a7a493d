"""Compilation of the C++ code for this machine, on first use, into the cache folder."""

import contextlib
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
from collections.abc import Iterator
from pathlib import Path

import torch

from normkit._util import cache_folder, write_whole

SOURCES, TORCH = Path(__file__).parent, Path(torch.__file__).parent
FLAGS = ("-std=c++20", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
WIDE = ("-mprefer-vector-width=512",) if platform.machine() == "x86_64" else ()  # compilers choose 256 bits
TIMEOUT = 300  # seconds; it takes about 25, half of them for PyTorch's headers

_lock = threading.Lock()


def is_loaded() -> bool:
    """Load the C++ kernels, `torch.ops.normkit`, and compile them before if needed; False if that fails."""
    return not obstacle()


@functools.cache
def obstacle() -> str:
    """The reason why there are no C++ kernels; empty if there are."""
    with _lock:
        return _load()


def _load() -> str:
    if sys.platform != "linux":
        return f"the C++ kernels need Linux; this is {sys.platform}"
    compiler = _compiler()
    if not compiler:
        return "there is no C++ compiler: install g++, or name one in CXX"
    include = [f"-I{TORCH / folder}" for folder in ("include", "include/torch/csrc/api/include")]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    # linked with the OpenMP that came with PyTorch, so that both use the same threads
    openmp = [str(path) for path in sorted(TORCH.glob("lib/libgomp*.so*"))[:1]]
    linked = [f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", *openmp, "-Wl,--as-needed"]
    arguments = [*FLAGS, *WIDE, abi, *include, str(SOURCES / "cpu" / "library.cpp"), *linked]
    try:
        torch.ops.load_library(str(_compiled(compiler, arguments)))
    except (OSError, subprocess.SubprocessError) as error:
        output = getattr(error, "stderr", "") or str(error)
        why = f"{compiler[0]} could not compile library.cpp, or Python not load it: {output.strip()[-500:]}"
        warnings.warn(f"normkit: {why}. Slower code runs instead", RuntimeWarning, stacklevel=2)
        return why
    return ""


def _compiled(compiler: list[str], arguments: list[str]) -> Path:
    """Path of the library, compiled unless that is done."""
    path = _private(cache_folder() / "native") / f"kernels-{_key(compiler, arguments)}.so"
    if not path.exists():
        with _alone(path):
            if not path.exists():
                sys.stderr.write("normkit: compiling its C++ kernels, once on a machine\n")
                _compile([*compiler, *arguments], path)
    return path


def _compiler() -> list[str]:
    given = shlex.split(os.environ.get("CXX", ""))
    found = (shutil.which(name) for name in ([given[0]] if given else ["g++", "c++", "clang++"]))
    first = next((path for path in found if path), None)
    return [first, *given[1:]] if first else []


def _key(compiler: list[str], arguments: list[str]) -> str:
    """Hash of all that matters to the result: machines may share a home folder."""
    about = Path("/proc/cpuinfo").read_text(encoding="utf8", errors="replace").split("\n\n")[0].splitlines()
    processor = [line for line in about if line.lower().startswith(("flags", "features", "model name", "cpu part"))]
    sources = [path.read_text(encoding="utf8") for path in sorted([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cpp")])]
    arguments = [argument.removeprefix(str(SOURCES)) for argument in arguments]  # the same wherever the sources are
    parts = [*sources, *compiler, *arguments, torch.__version__, platform.machine(), *processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _private(folder: Path) -> Path:
    """The folder, or the user's temporary one, or a new one: writable by the user alone."""
    for path in (folder, Path(tempfile.gettempdir()) / f"normkit-{os.getuid()}"):
        with contextlib.suppress(OSError):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            target = path.resolve()  # others could exchange a link
            status = target.stat()
            ours = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            if ours and os.access(target, os.W_OK):
                return target
    return Path(tempfile.mkdtemp(prefix="normkit-"))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process compile, while others, such as the ranks of a training, wait."""
    import fcntl  # not on Windows, where nothing is compiled

    with path.with_suffix(".lock").open("w") as file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(command: list[str], path: Path) -> None:
    """Compile into a temporary folder, then write the result as a whole.

    Other processes never find half a file, nor do later ones after a power cut: loading one ends the process.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        made = Path(place) / path.name
        subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True, timeout=TIMEOUT)
        write_whole(path, made.read_bytes())
