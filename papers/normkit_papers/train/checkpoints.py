"""Checkpoints to resume a run from, written atomically; reading them executes nothing."""

import contextlib
import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit._util import write_whole
from normkit_papers.train.lightning import lightning


class AtomicCheckpoints(lightning.plugins.CheckpointIO):  # type: ignore[reportAttributeAccessIssue]
    """Plugin that writes and reads the checkpoints of Lightning's Trainer."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the whole file or, with an OSError, nothing."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(Path(path), buffer.getvalue())

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        """Read tensors and plain values only."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a checkpoint."""
        Path(path).unlink(missing_ok=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step in a run folder."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def checkpoints(folder: Path) -> list[Path]:
    """List the checkpoints of a run folder, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*.ckpt"))


def remove_temporary(folder: Path) -> None:
    """Remove unfinished checkpoints of killed processes; the caller holds the folder's lock."""
    for path in (folder / "checkpoints").glob(".step-*.ckpt.*"):
        if not path.name.endswith(f".{os.getpid()}"):
            with contextlib.suppress(OSError):
                path.unlink()


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises:
        ValueError: If the file is cut short or is not a checkpoint of a run.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} is cut short or not a checkpoint of a run ({reason}); delete it to resume from the one before it, "
            "or from the start"
        ) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{path} is not a checkpoint of a run: it has no weights; delete it")
    return content


def model_state(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of the model in a checkpoint."""
    prefix = "model."
    return {
        name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items() if name.startswith(prefix)
    }
