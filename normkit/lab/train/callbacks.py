"""What a run notes while it trains, and when it stops: losses, statistics, checkpoints, the state of chance."""

import math
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.lab.report import results
from normkit.lab.tasks import TASKS
from normkit.lab.train.checkpoints import checkpoint_path, checkpoints
from normkit.lab.train.config import Run
from normkit.lab.train.distributed_env import first
from normkit.lab.train.lit import lightning
from normkit.lab.train.parallel import gathered
from normkit.lab.train.progress import Progress
from normkit.lab.train.schedules import ValidationDecay
from normkit.watch import Recorder, Row, embedding_rows
from normkit.watch.rows import Appender, cut_or_begin


class Journal(lightning.Callback):
    """Keeps the curve, validates, writes checkpoints, and ends a run that diverged or was asked to stop.

    Losses are read from the device every `look` steps only, all of them, so that a divergence is dated to its step.
    `on_progress` is called at the same time; what it returns says whether to stop.
    """

    def __init__(self, run: Run, folder: Path, on_progress: Callable[[Progress], object] | None = None):
        self.run, self.folder, self.on_progress = run, folder, on_progress or (lambda _: False)
        self.look = max(1, run.steps // 200)
        self.status = "done"
        self.curve: list[dict[str, float]] = []
        self.valid: list[dict[str, float]] = []
        self.words = self.tokens = 0
        self.seconds = 0.0  # of training steps only
        self.step = 0
        self._losses: list[Tensor] = []
        self._count = 0
        self._lr = 0.0
        self._rng: list[dict[str, Any]] = []  # of each process
        self._started = 0.0
        self._first = (0.0, 0)
        self._recorder: Recorder | None = None
        self._recorded: dict[str, Any] = {}  # what a resumed run needs to go on with rows.csv

    # -- the hooks of Lightning -------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the clock and the recording; take chance back to where a resumed run left it."""
        if len(set(steps := gathered(self.step))) > 1:
            raise ValueError(
                f"the run's processes would go on from different steps, {steps}: {self.folder} must be one folder that "
                "all hosts see, or have the same checkpoints on each"
            )
        self._record(pl_module.model)
        if self._rng:
            _set_rng(self._rng[trainer.global_rank])
        self._started = time.perf_counter()
        self._first = (self.seconds, self.tokens)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note the learning rate, which has moved on when the step has ended."""
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Note one batch and, where it ends a step, do what is due."""
        self._losses.append(outputs["seen"])
        self._count += 1
        self.words += batch.words
        self.tokens += batch.tokens
        if self._count % self.run.accumulate:
            return
        self.step += 1
        if self.step % self.look == 0 or self.step in (1, self.run.steps):
            self._read(trainer)
        if _due(self.step, self.run.valid_every) and not trainer.should_stop:
            self._pause()
            self.valid.append(trainer.strategy.broadcast({"step": self.step, **pl_module.look()}))
            if isinstance(schedule := trainer.lr_scheduler_configs[0].scheduler, ValidationDecay):
                schedule.validated(self._goodness(self.valid[-1]))
            self._resume()
        if self._enough(trainer.optimizers[0].param_groups[0]["lr"]):
            self._read(trainer)
            trainer.should_stop = True
        ends_early = self.status.startswith("interrupted") and self.run.checkpoint_every > 0
        if ends_early or (_due(self.step, self.run.checkpoint_every) and self.status == "done"):
            self._pause()
            trainer.save_checkpoint(checkpoint_path(self.folder, self.step))
            kept = {*self.kept(self.run.keep), *checkpoints(self.folder)[-1:]}
            for path in checkpoints(self.folder) if trainer.is_global_zero else []:
                if path not in kept:
                    path.unlink()
            self._resume()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Stop the clock and the recording."""
        self._pause()
        self._close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave no hooks behind."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to continue as if nothing had happened."""
        return {
            "step": self.step,
            "curve": self.curve,
            "valid": self.valid,
            "recorded": self._recorded_so_far(),
            "losses": [float(loss) for loss in self._losses],
            "words": self.words,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "rng": gathered(_rng()),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.step = state_dict["step"]
        self.curve, self.valid = state_dict["curve"], state_dict["valid"]
        self._recorded = state_dict.get("recorded") or {}
        self._losses = [torch.tensor(loss, dtype=torch.float64) for loss in state_dict["losses"]]
        self.words, self.tokens, self.seconds = state_dict["words"], state_dict["tokens"], state_dict["seconds"]
        self._rng = state_dict["rng"]

    # -- the rest -----------------------------------------------------------------------------------------------------

    def kept(self, count: int) -> list[Path]:
        """So many checkpoints, oldest first: the last, or those of the best looks at the validation split."""
        paths = checkpoints(self.folder)
        if self.run.average_of == "last":
            return paths[-count:]
        value = {checkpoint_path(self.folder, int(look["step"])): self._goodness(look) for look in self.valid}
        return sorted(sorted(paths, key=lambda path: value.get(path, -math.inf))[-count:])

    def _goodness(self, look: dict[str, float]) -> float:
        return look["bleu"] if self.run.valid_bleu else -look["loss"]

    def _enough(self, lr: float) -> bool:
        """Whether a rule of the run ends it before its last step."""
        if self.step > self.run.warmup and lr < self.run.stop_lr:
            return True
        values = [self._goodness(look) for look in self.valid]
        return bool(self.run.patience and values) and len(values) - 1 - values.index(max(values)) >= self.run.patience

    def _read(self, trainer: Any) -> None:
        """Read the losses since the last time: the curve, progress, and whether to go on."""
        if not self._losses:
            return
        losses = torch.stack([loss.to(torch.float64) for loss in self._losses]).tolist()
        first = self.step - len(losses) // self.run.accumulate + 1
        self._losses.clear()
        if trainer.world_size > 1:  # all processes must stop at once
            losses = [max(each, key=lambda x: not math.isfinite(x)) for each in zip(*gathered(losses), strict=True)]
        bad = [i for i, loss in enumerate(losses) if not math.isfinite(loss)]
        mean = sum(losses) / len(losses)
        if self._recorder is not None:
            self._recorder.rows.flush()
        if bad:
            self.status = f"diverged at step {first + bad[0] // self.run.accumulate}"
            trainer.should_stop = True
        else:
            self.curve.append({"step": self.step, "train_loss": mean, "lr": self._lr})
        if trainer.is_global_zero:
            parameters = sum(parameter.numel() for parameter in trainer.lightning_module.model.parameters())
            results.note(self.folder, parameters, self.curve, self.valid)
        seconds, tokens = self.seconds + time.perf_counter() - self._started, self.tokens
        rate = (tokens - self._first[1]) / max(seconds - self._first[0], 1e-9)
        left = (self.run.steps - self.step) * tokens / self.step / rate
        told = Progress(
            "training", self.step, self.run.steps, mean, rate * trainer.world_size, left, TASKS[self.run.task].unit
        )
        asked = any(gathered(bool(self.on_progress(told))))  # all processes must stop at once
        if asked and self.status == "done" and self.step < self.run.steps:
            self.status = f"interrupted at step {self.step}"
            trainer.should_stop = True

    def _pause(self) -> None:
        self.seconds += time.perf_counter() - self._started

    def _resume(self) -> None:
        self._started = time.perf_counter()

    def _record(self, model: torch.nn.Module) -> None:
        """Start to record into rows.csv, where a resumed run takes away what came after its checkpoint.

        The first process writes; the others look along, for what is reduced over all of them (`sync=True`).
        """
        path = self.folder / "rows.csv"
        if first():
            cut_or_begin(path, self._recorded.get("bytes"))
        if self.run.record_every:
            forwards, before = self.run.record_every * self.run.accumulate, self.step * self.run.accumulate
            self._recorder = Recorder(model, forwards, self.run.quantities, to=path, keep=50_000, start=before)
            self._recorder.load(self._recorded.get("memory", {}))
            self._recorder.follow()

    def _recorded_so_far(self) -> dict[str, Any]:
        if self._recorder is None:
            return {}
        self._recorder.rows.flush()
        size = (self.folder / "rows.csv").stat().st_size if first() else None  # other hosts may not have the folder
        return {"bytes": size, "memory": self._recorder.state()}

    def record_end(self, model: torch.nn.Module, scores: Mapping[str, Mapping[str, float]]) -> None:
        """Add to rows.csv what is looked at once: singular values of embeddings, what evaluation loses."""
        modes = {"batch": "loss_train_mode", "running": "loss_eval_mode"}
        losses = [
            Row(self.step, "", "", name, scores[mode]["loss"])
            for mode, name in modes.items()
            if "loss" in scores.get(mode, {}) and "batch" in scores
        ]
        if self.run.record_every:
            Appender(self.folder / "rows.csv")([*embedding_rows(model, self.step), *losses])

    def _close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _rng() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all(), "python": random.getstate()}


def _set_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
