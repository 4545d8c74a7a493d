"""Origin of a result: commit, versions, machine."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

import normkit


def environment(device: str = "auto", count: int = 1) -> dict[str, object]:
    """Return commit, versions and machine of this process, for result files.

    Args:
        device: "cpu" names the processor also if there is a GPU.
        count: Number of devices; 8 are named "8 x NAME".

    Returns:
        A dictionary; `commit` and `dirty` are None if the package is not in a git checkout of its own.
    """
    commit, dirty = _checkout(Path(normkit.__file__).parent)
    name = torch.cuda.get_device_name() if device != "cpu" and torch.cuda.is_available() else _processor()
    return {
        "commit": commit,
        "dirty": dirty,
        "normkit": normkit.__version__,
        "torch": torch.__version__,
        "lightning": _version("lightning"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": name if count == 1 else f"{count} x {name}",
        "threads": torch.get_num_threads(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _checkout(package: Path) -> tuple[str | None, bool | None]:
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None  # installed, or inside another repository
    return _git(package, "rev-parse", "HEAD"), bool(_git(package, "status", "--porcelain"))


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", folder, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
