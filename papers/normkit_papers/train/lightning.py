"""Lightning: its import, and a Trainer without its own messages that writes whole checkpoints."""

import contextlib
import importlib.util
import io
import logging
import os
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from normkit._util import write_whole
from normkit_papers.models.torchvision_ops import load_torchvision

if importlib.util.find_spec("torchvision") is not None:
    load_torchvision()  # torchmetrics, which Lightning imports, imports it

import lightning.pytorch as lightning
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, WeightAveraging
from lightning.pytorch.plugins import TorchCheckpointIO

from normkit.watch.lightning import Watch

__all__ = ["EarlyStopping", "ModelCheckpoint", "Watch", "WeightAveraging", "lightning", "make_trainer", "run_trainer"]


class WholeCheckpoints(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all; Lightning's own may copy it from another file system."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write the file aside, then rename it."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(Path(path), buffer.getvalue())


def make_trainer(folder: Path | None, **given: Any) -> lightning.Trainer:
    """Create a Trainer; `given` are its other arguments."""
    os.environ["SLURM_JOB_NAME"] = "interactive"  # a run is no task of SLURM, which would requeue it
    with _quiet():
        return lightning.Trainer(
            plugins=WholeCheckpoints(),
            default_root_dir=folder,
            enable_checkpointing=any(isinstance(c, Checkpoint) for c in given.get("callbacks", ())),
            enable_progress_bar=False,
            enable_model_summary=False,
            **{"logger": False, **given},
        )


def run_trainer(trainer: lightning.Trainer, module: lightning.LightningModule, checkpoint: Path | None) -> None:
    """Train a module, from a checkpoint if there is one.

    Raises:
        KeyboardInterrupt: At an interrupt, where Lightning would exit and ignore further ones.
    """
    on_interrupt = signal.getsignal(signal.SIGINT)
    try:
        with _quiet():
            trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            signal.signal(signal.SIGINT, on_interrupt)
            raise KeyboardInterrupt from None
        raise


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Lightning's advice on choices that are made here."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning\.")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
