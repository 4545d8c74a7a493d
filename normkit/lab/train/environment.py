"""Where a result comes from: commit, versions, machine."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

import normkit


def where(device: str = "auto", count: int = 1) -> dict[str, object]:
    """Commit, versions and machine of this process, as result files keep them.

    The machine is named after its GPU where it has one, unless `device` is "cpu"; `count` devices are
    "8 x NAME". `commit` and `dirty` are None where the package does not lie in a git checkout of its own.
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
        return None, None  # installed, or inside somebody else's repository
    return _git(package, "rev-parse", "HEAD"), bool(_git(package, "status", "--porcelain"))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, check=False, timeout=10
        )
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
