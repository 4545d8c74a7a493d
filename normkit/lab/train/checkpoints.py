"""Checkpoints to resume a run from: written atomically, read without running anything that is in them."""

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.files import write_whole
from normkit.lab.train.lit import lightning


class AtomicCheckpoints(lightning.plugins.CheckpointIO):  # type: ignore[reportAttributeAccessIssue]
    """How Lightning's Trainer writes and reads its checkpoints here."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write all of it or, with an OSError, nothing."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(Path(path), buffer.getvalue())

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = True) -> dict[str, Any]:
        """Read tensors and plain values, nothing that could run."""
        return read_checkpoint(Path(path))

    def remove_checkpoint(self, path: Any) -> None:
        """Delete one."""
        Path(path).unlink(missing_ok=True)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Where the checkpoint of a step lies in a run folder."""
    return folder / "checkpoints" / f"step-{step:08d}.ckpt"


def checkpoints(folder: Path) -> list[Path]:
    """The checkpoints of a run folder, oldest first."""
    return sorted((folder / "checkpoints").glob("step-*.ckpt"))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """All of a checkpoint; ValueError where the file is cut short or is something else."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} is cut short or no checkpoint of ours ({reason}); delete it to resume from the one before"
        ) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{path} is no checkpoint of a run: it has no weights")
    return content


def model_state(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """The model's own part of a checkpoint."""
    prefix = "model."
    return {
        name.removeprefix(prefix): value for name, value in checkpoint["state_dict"].items() if name.startswith(prefix)
    }
