"""Lightning's Trainer without its own messages, logs and checkpoints."""

import contextlib
import logging
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from normkit_papers.train.checkpoints import AtomicCheckpoints
from normkit_papers.train.lightning import lightning
from normkit_papers.train.parallel import cluster_plugins


def make_trainer(folder: Path | None, **given: Any) -> lightning.Trainer:
    """Create a Trainer that writes whole checkpoints; `given` are its other arguments."""
    with _quiet():
        return lightning.Trainer(
            plugins=[AtomicCheckpoints(), *cluster_plugins()],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **given,
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
