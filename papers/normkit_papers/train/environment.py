"""Origin of a result: commit, versions, machine."""

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path

import torch

import normkit
from normkit_papers.train.parallel import device_type


def environment(device: str = "auto", count: int = 1) -> dict[str, object]:
    """Return commit, versions and machine of this process; `count` is the number of devices.

    `commit` and `dirty` are None if they are unknown, as outside of a git checkout.
    """
    commit, dirty = _checkout(Path(normkit.__file__).parent)
    name = torch.cuda.get_device_name() if device_type(device) == "cuda" else _processor()
    return {
        "commit": commit,
        "dirty": dirty,
        "normkit": normkit.__version__,
        "torch": torch.__version__,
        "lightning": importlib.metadata.version("lightning"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": name if count == 1 else f"{count} x {name}",
        "threads": torch.get_num_threads(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def _checkout(package: Path) -> tuple[str | None, bool | None]:
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None, None  # installed, or inside another repository
    changes = _git(package, "status", "--porcelain")  # None after a timeout, as on a slow file system
    return _git(package, "rev-parse", "HEAD"), None if changes is None else bool(changes)


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", folder, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
