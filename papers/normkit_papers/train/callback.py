"""Callback of a run: losses, validation, progress, the random state, and the end of training."""

import math
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit_papers.train.config import Run
from normkit_papers.train.folder import BEST, CHECKPOINTS, checkpoints
from normkit_papers.train.lightning import EarlyStopping, ModelCheckpoint, WeightAveraging, lightning
from normkit_papers.train.parallel import all_gather

REPORT_EVERY = 1.0  # seconds
SCORE = "valid_score"  # what early stopping and the choice of checkpoints maximize
STATE = ("step", "curve", "valid", "tokens", "seconds")  # of a callback, kept in checkpoints


class Progress(NamedTuple):
    """Progress of a run; `stage` is "training", later what is done with the trained model."""

    stage: str
    step: int
    steps: int
    loss: float = math.nan  # mean training loss since the last progress


class RunCallback(lightning.Callback):
    """Records and validates; ends runs that diverge, stagnate or are interrupted.

    Losses are copied from the device every `log_every` steps only, all of them, so that a divergence gets its exact
    step. `on_progress` is called at the same time, on one device also each second; the run stops if it returns True.

    Validation is here and not in Lightning's own loop, which begins after the checkpoint of a step has been written: a
    run that is resumed from it would miss the validation.
    """

    def __init__(self, run: Run, folder: Path, on_progress: Callable[[Progress], object] | None = None):
        self.run, self.folder, self.on_progress = run, folder, on_progress or (lambda _: False)
        self.log_every = max(1, run.steps // 200)
        self.status = "done"
        self.curve: list[dict[str, float]] = []
        self.valid: list[dict[str, float]] = []
        self.step = 0
        self.tokens = 0  # of batches that took `seconds`; a process' first one is left out, as it may compile
        self.seconds = 0.0
        self._losses: list[Tensor] = []
        self._mean = math.nan  # of the losses that were copied last
        self._reported = 0.0
        self._lr = 0.0
        self._rng: list[dict[str, Any]] = []  # of each process
        self._started: float | None = None
        self._is_warm = False  # the first batch of this process is over
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the random state of a resumed run."""
        if threading.current_thread() is threading.main_thread():  # Lightning ends at SIGTERM without a result
            signal.signal(signal.SIGTERM, self._on_sigterm)
        if self._rng:
            _set_rng(self._rng[trainer.global_rank])
            stopping = trainer.early_stopping_callback
            stopped = stopping is not None and stopping.wait_count >= stopping.patience  # it ended, but unscored
            trainer.should_stop = stopped or self._rate_is_low(trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Start the clock, unless it runs."""
        if self._is_warm and self._started is None:
            self._started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Store the learning rate of this step, which at its end is already that of the next."""
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record a batch; at the end of a step, log and validate if it is time."""
        self._losses.append(outputs["recorded"])
        if self._started is not None:
            self.tokens += batch.tokens
        self._is_warm = True
        if trainer.global_step == self.step:  # gradients are accumulated
            return
        self.step = trainer.global_step
        if self.step % self.log_every == 0 or self.step in (1, self.run.steps):
            self._log(trainer)
        elif trainer.world_size == 1 and time.perf_counter() - self._reported > REPORT_EVERY:
            self._report(trainer)
        if self.run.valid_every and self.step % self.run.valid_every == 0 and not self.status.startswith("diverged"):
            self.stop_clock()
            self._validate(trainer, pl_module)
        if self._rate_is_low(trainer):
            trainer.should_stop = True
        if trainer.should_stop and self.status == "done":
            self._log(trainer)
        if self.status.startswith("interrupted") and self.run.checkpoint_every:
            trainer.save_checkpoint(self.folder / CHECKPOINTS / f"step-{self.step:08d}.ckpt")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock."""
        self.stop_clock()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs to continue as if it had not been interrupted."""
        self.stop_clock()
        state = {name: getattr(self, name) for name in STATE}
        return state | {"losses": self._copy_losses(), "rng": all_gather(_rng())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in STATE:
            setattr(self, name, state_dict[name])
        self._mean = self.curve[-1]["train_loss"] if self.curve else math.nan
        self._losses = [torch.tensor(loss, dtype=torch.float64) for loss in state_dict["losses"]]
        self._rng = state_dict["rng"]

    def stop_clock(self) -> None:
        """Count the time since the clock was started."""
        if self._started is not None:
            self.seconds += time.perf_counter() - self._started
            self._started = None

    def _validate(self, trainer: Any, module: Any) -> None:
        """Score the validation split, with averaged weights if any; all processes use rank 0's scores."""
        averaging = [c for c in trainer.callbacks if isinstance(c, WeightAveraging)]
        for each in averaging:
            each.on_validation_epoch_start(trainer, module)  # exchanges the weights and their average
        point = trainer.strategy.broadcast({"step": self.step, **module.validate()})
        for each in averaging:
            each.on_validation_epoch_end(trainer, module)
        self.valid.append(point)
        score = point["bleu"] if getattr(self.run, "valid_bleu", False) else -point["loss"]
        score = -math.inf if math.isnan(score) else score
        module.log(SCORE, score, logger=False)
        for logger in trainer.loggers:
            logger.log_metrics({f"valid_{name}": value for name, value in point.items() if name != "step"}, self.step)
        if trainer.early_stopping_callback is not None:
            trainer.early_stopping_callback.on_validation_end(trainer, module)
        trainer.lr_scheduler_configs[0].scheduler.validated(score)

    def _rate_is_low(self, trainer: Any) -> bool:
        return self.step > self.run.warmup and trainer.optimizers[0].param_groups[0]["lr"] < self.run.stop_lr

    def _log(self, trainer: Any) -> None:
        """Copy new losses from the device, extend the curve, report progress, stop if needed."""
        if not self._losses:
            return
        losses = self._copy_losses()
        first = self.step - len(losses) // self.run.accumulate + 1
        self._losses.clear()
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        self._mean = sum(losses) / len(losses)
        if bad:
            self.status = f"diverged at step {first + bad[0] // self.run.accumulate}"
            trainer.should_stop = True
        else:
            point = {"train_loss": self._mean, "lr": self._lr}
            self.curve.append({"step": self.step, **point})
            for logger in trainer.loggers:
                logger.log_metrics(point, self.step)
        self._report(trainer)

    def _copy_losses(self) -> list[float]:
        """Return the losses since the last log, each the mean over all processes.

        So all of them find a loss that is not finite at the same step.
        """
        losses = torch.stack([loss.to(torch.float64) for loss in self._losses]).tolist() if self._losses else []
        return [sum(each) / len(each) for each in zip(*all_gather(losses), strict=True)]

    def _report(self, trainer: Any) -> None:
        """Report progress, and stop if the answer is True."""
        self._reported = time.perf_counter()
        progress = Progress("training", self.step, self.run.steps, self._mean)
        stop = any(all_gather(bool(self.on_progress(progress))))  # all processes at once
        if stop and self.status == "done" and self.step < self.run.steps:
            self.status = f"interrupted at step {self.step}"
            trainer.should_stop = True


def checkpointing(run: Run, folder: Path) -> list[lightning.Callback]:
    """Return Lightning's callbacks that stop early, and that keep the best and the last checkpoints."""

    def keep(place: str, monitor: str, count: int, weights_only: bool) -> ModelCheckpoint:
        return ModelCheckpoint(
            folder / place, filename="step-{step:08d}", auto_insert_metric_name=False, enable_version_counter=False,
            monitor=monitor, mode="max", save_top_k=count, every_n_train_steps=run.checkpoint_every,
            save_weights_only=weights_only,
        )  # fmt: skip

    found: list[lightning.Callback] = []
    if run.patience:
        how: Any = {"check_finite": False, "check_on_train_epoch_end": False, "strict": False}
        found.append(EarlyStopping(SCORE, mode="max", patience=run.patience, **how))
    if run.checkpoint_every:
        if run.average and run.average_of == "best":
            found.append(keep(BEST, SCORE, run.average, True))
        found.append(keep(CHECKPOINTS, "step", run.keep, False))  # last: it has the state of the others
    return found


def to_average(run: Run, folder: Path) -> list[Path]:
    """List the checkpoints whose weights a run averages: the last ones, or those of the best validations.

    Those of interrupts are left out, so that a resumed run averages the same ones as without an interruption.
    """
    if run.average_of == "best":
        return sorted((folder / BEST).glob("*.ckpt"))
    return [path for path in checkpoints(folder) if int(path.stem[5:]) % run.checkpoint_every == 0][-run.average :]


def _rng() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all(), "python": random.getstate()}


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    for device, value in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):  # it may have fewer now
        torch.cuda.set_rng_state(value, device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
