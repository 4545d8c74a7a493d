"""Lightning callback of a run: losses, validation, statistics, checkpoints, early end."""

import math
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.build import is_loaded
from normkit.norms import StatNorm
from normkit.watch import Recorder, Row
from normkit.watch.row_files import Appender, truncate_file
from normkit_papers.report import results
from normkit_papers.singular_values import embedding_rows
from normkit_papers.tasks import TASKS
from normkit_papers.train.checkpoints import checkpoint_path, checkpoints
from normkit_papers.train.config import Run
from normkit_papers.train.distributed_env import is_rank_zero
from normkit_papers.train.lightning import lightning
from normkit_papers.train.nt_asgd import NTASGD, averaged
from normkit_papers.train.parallel import all_gather
from normkit_papers.train.progress import Progress
from normkit_papers.train.schedules import ValidationDecay

REPORT_EVERY = 1.0  # seconds
STATE = ("step", "curve", "valid", "words", "tokens", "seconds")  # of a callback, kept as it is in checkpoints


class RunCallback(lightning.Callback):
    """Callback that records, validates, writes checkpoints, and ends runs early.

    A run ends early if it diverges, stagnates (`patience`, `stop_lr`) or is interrupted.

    Losses are copied from the device every `log_every` steps only, all of them, so that a divergence gets its exact
    step. `on_progress` is called at the same time, on one device also each second; the run stops if it returns True.
    """

    def __init__(self, run: Run, folder: Path, on_progress: Callable[[Progress], object] | None = None):
        self.run, self.folder, self.on_progress = run, folder, on_progress or (lambda _: False)
        self.log_every = max(1, run.steps // 200)
        self.status = "done"
        self.before_training: Callable[[], object] = lambda: None
        self.curve: list[dict[str, float]] = []
        self.valid: list[dict[str, float]] = []
        self.words = self.tokens = 0
        self.seconds = 0.0  # of training steps only
        self.step = 0
        self._losses: list[Tensor] = []
        self._mean = math.nan  # of the losses that were copied last
        self._reported = 0.0
        self._batches = 0
        self._lr = 0.0
        self._rng: list[dict[str, Any]] = []  # of each process
        self._started = 0.0
        self._measured: tuple[float, int] | None = None  # seconds and tokens after the first step, which may compile
        self._recorder: Recorder | None = None
        self._recorded: dict[str, Any] = {}  # state that a resumed run needs to continue rows.csv
        self._on_sigterm = signal.getsignal(signal.SIGTERM)

    # -- hooks of Lightning -------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock and the recorder, and restore the random state of a resumed run."""
        if len(set(steps := all_gather(self.step))) > 1:
            raise ValueError(
                f"the processes of the run would resume from different steps, {steps}: {self.folder} must be one "
                "folder that all hosts share, or have the same checkpoints on each"
            )
        if threading.current_thread() is threading.main_thread():  # Lightning ends at SIGTERM without a result
            signal.signal(signal.SIGTERM, self._on_sigterm)
        self.before_training()
        self._start_recorder(pl_module.model)
        if self._rng:
            _set_rng(self._rng[trainer.global_rank])
            trainer.should_stop = self._ends_early(trainer.optimizers[0].param_groups[0]["lr"])  # ended unscored
        if any(isinstance(module, StatNorm) for module in pl_module.modules()):
            is_loaded()  # they are compiled in the first run on a machine, which is no part of the training time
        self._started = time.perf_counter()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Store the learning rate of this step, which at its end is already that of the next."""
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Record a batch; at the end of a step, log, validate and save if it is time."""
        self._losses.append(outputs["recorded"])
        self._batches += 1
        self.words += batch.words
        self.tokens += batch.tokens
        if self._batches % self.run.accumulate:
            return
        self.step += 1
        if self.step % self.log_every == 0 or self.step in (1, self.run.steps):
            self._log(trainer)
        elif trainer.world_size == 1 and time.perf_counter() - self._reported > REPORT_EVERY:
            self._report(trainer)
        if _due(self.step, self.run.valid_every) and not self.status.startswith("diverged"):
            self._pause()
            optimizer = trainer.optimizers[0]
            with averaged(optimizer):
                self.valid.append(trainer.strategy.broadcast({"step": self.step, **pl_module.validate()}))
            if isinstance(optimizer, NTASGD):
                optimizer.validated([-self._goodness(point) for point in self.valid])
            if isinstance(schedule := trainer.lr_scheduler_configs[0].scheduler, ValidationDecay):
                schedule.validated(self._goodness(self.valid[-1]))
            self._resume()
        if self._ends_early(trainer.optimizers[0].param_groups[0]["lr"]):
            self._log(trainer)
            trainer.should_stop = True
        interrupted = self.status.startswith("interrupted") and self.run.checkpoint_every > 0
        if interrupted or (_due(self.step, self.run.checkpoint_every) and self.status == "done"):
            self._pause()
            trainer.save_checkpoint(checkpoint_path(self.folder, self.step))
            kept = {*self.kept(self.run.keep), *checkpoints(self.folder)[-1:]}
            for path in checkpoints(self.folder) if trainer.is_global_zero else []:
                if path not in kept:
                    path.unlink()
            self._resume()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock and the recorder."""
        self._pause()
        self._stop_recorder()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the recorder's hooks."""
        self._stop_recorder()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs to continue as if it had not been interrupted."""
        more = {"recorded": self._recorder_state(), "losses": self._copy_losses(), "rng": all_gather(_rng())}
        return {name: getattr(self, name) for name in STATE} | more

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in STATE:
            setattr(self, name, state_dict[name])
        self._mean = self.curve[-1]["train_loss"] if self.curve else math.nan
        self._recorded = state_dict.get("recorded") or {}
        self._losses = [torch.tensor(loss, dtype=torch.float64) for loss in state_dict["losses"]]
        self._rng = state_dict["rng"]

    # -- curve, progress, early end -----------------------------------------------------------------------------------

    def kept(self, count: int) -> list[Path]:
        """Return the last `count` checkpoints, or those of the best validations, oldest first.

        Those of interrupts are left out, so that a resumed run averages the same ones as without an interruption.
        """
        paths = [path for path in checkpoints(self.folder) if _due(int(path.stem[5:]), self.run.checkpoint_every)]
        if self.run.average_of == "last":
            return paths[-count:]
        value = {checkpoint_path(self.folder, int(point["step"])): self._goodness(point) for point in self.valid}
        return sorted(sorted(paths, key=lambda path: value.get(path, -math.inf))[-count:])

    def _goodness(self, validation: dict[str, float]) -> float:
        value = validation["bleu"] if self.run.valid_bleu else -validation["loss"]
        return -math.inf if math.isnan(value) else value  # max() of a list that begins with nan is nan

    def _ends_early(self, lr: float) -> bool:
        """Return True if `stop_lr` or `patience` ends the run."""
        if self.step > self.run.warmup and lr < self.run.stop_lr:
            return True
        values = [self._goodness(point) for point in self.valid]
        return bool(self.run.patience and values) and len(values) - 1 - values.index(max(values)) >= self.run.patience

    def _log(self, trainer: Any) -> None:
        """Copy new losses from the device, extend the curve, report progress, stop if needed."""
        if not self._losses:
            return
        losses = self._copy_losses()
        first = self.step - len(losses) // self.run.accumulate + 1
        self._losses.clear()
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        self._mean = sum(losses) / len(losses)
        if self._recorder is not None:
            self._recorder.rows.flush()
        if bad:
            self.status = f"diverged at step {first + bad[0] // self.run.accumulate}"
            trainer.should_stop = True
        else:
            self.curve.append({"step": self.step, "train_loss": self._mean, "lr": self._lr})
        if trainer.is_global_zero:
            parameters = sum(parameter.numel() for parameter in trainer.lightning_module.model.parameters())
            results.note(self.folder, parameters, self.curve, self.valid)
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
        stop = any(all_gather(bool(self.on_progress(self._progress(trainer.world_size)))))  # all processes at once
        if stop and self.status == "done" and self.step < self.run.steps:
            self.status = f"interrupted at step {self.step}"
            trainer.should_stop = True

    def _progress(self, processes: int) -> Progress:
        """Return the progress.

        Speed and remaining time are unknown after the first step, which includes compilation.
        """
        seconds, rate, left = self.seconds + time.perf_counter() - self._started, 0.0, None
        if self._measured is None:
            self._measured = seconds, self.tokens
        else:
            rate = (self.tokens - self._measured[1]) / max(seconds - self._measured[0], 1e-9)
            left = (self.run.steps - self.step) * self.tokens / self.step / rate
        unit = TASKS[self.run.task].unit
        return Progress("training", self.step, self.run.steps, self._mean, rate * processes, left, unit)

    def _pause(self) -> None:
        self.seconds += time.perf_counter() - self._started

    def _resume(self) -> None:
        self._started = time.perf_counter()

    # -- statistics of the norms --------------------------------------------------------------------------------------

    def _start_recorder(self, model: torch.nn.Module) -> None:
        """Record into rows.csv; a resumed run first removes the rows after its checkpoint.

        Rank 0 writes; the others record too, for what is reduced over all of them (`sync=True`).
        """
        path = self.folder / "rows.csv"
        if is_rank_zero():
            truncate_file(path, self._recorded.get("bytes"))
        if self.run.record_every:
            forwards, before = self.run.record_every * self.run.accumulate, self.step * self.run.accumulate
            self._recorder = Recorder(model, forwards, self.run.quantities, to=path, keep=50_000, start=before)
            self._recorder.load(self._recorded.get("memory", {}))
            self._recorder.follow()

    def _recorder_state(self) -> dict[str, Any]:
        if self._recorder is None:
            return {}
        self._recorder.rows.flush()
        size = (self.folder / "rows.csv").stat().st_size if is_rank_zero() else None  # other hosts may lack the folder
        return {"bytes": size, "memory": self._recorder.state()}

    def record_end(self, model: torch.nn.Module, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Add the values measured once at the end to rows.csv.

        These are singular values of embeddings, and the losses with statistics of donors and with running ones.
        """
        modes = {"donors": "loss_train_mode", "running": "loss_eval_mode"}
        losses = [
            Row(self.step, "", "", name, scores[mode]["loss"])
            for mode, name in modes.items()
            if "loss" in scores.get(mode, {}) and "donors" in scores
        ]
        if self.run.record_every:
            if not self._started:  # resumed after the last step, perhaps of a process that was killed after this
                truncate_file(self.folder / "rows.csv", self._recorded.get("bytes"))
            Appender(self.folder / "rows.csv")([*embedding_rows(model, self.step), *losses])

    def _stop_recorder(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _rng() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all(), "python": random.getstate()}


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    for device, value in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):  # it may have fewer now
        torch.cuda.set_rng_state(value, device)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
