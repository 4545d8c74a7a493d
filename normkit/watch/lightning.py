"""Record the norms of any LightningModule: rows to a file and to loggers."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning

from normkit._util import unknown
from normkit.watch import Recorder, Row, Rows
from normkit.watch.rows import Appender, truncate_file

LOGGED = ("gap_batch", "gap_quadratic", "rms", "largest", "gradient_norm")
"""Quantities that loggers are given unless others are named."""


def log_rows(rows: Iterable[Row], loggers: Iterable[Any], quantities: Iterable[str] = LOGGED) -> None:
    """Log rows as `quantity/site`, those of a step in one call.

    For a run that has ended: `log_rows(normkit.watch.read("runs/mine"), [TensorBoardLogger("logs")])`.

    Args:
        rows: Recorded rows.
        loggers: Loggers of Lightning, such as TensorBoard, W&B or CSV.
        quantities: Quantities to log.
    """
    chosen, by_step = frozenset(quantities), dict[int, dict[str, float]]()
    for row in rows:
        if row.quantity in chosen:
            name = f"{row.quantity}/{row.site}" if row.site else row.quantity
            by_step.setdefault(row.step, {})[name] = row.value
    for logger in loggers:
        for step, values in sorted(by_step.items()):
            logger.log_metrics(values, step)


class Watch(lightning.Callback):
    """Records the loss and statistics of norms: `Trainer(callbacks=[Watch(to="rows.csv")])`.

    Padding is found by embeddings, and by `attention_mask` or `...padding_mask` of a batch that is a mapping.

    Args:
        every: Batches from one measurement to the next.
        quantities: As for `normkit.record`.
        to: CSV file of all rows; rows of another run in it are replaced, unless this one is resumed. By default none.
        log: Quantities for the loggers of the trainer, as `quantity/site`, at Lightning's global step.
        log_every: Batches from one call of the loggers to the next.
        keep: Number of rows held in memory.
        part: Name of the submodule to record; by default the whole LightningModule.
        loss: Name of the submodule that computes the loss, as for `normkit.record`; by default the loss that
            `training_step` returns is recorded, alone.

    Attributes:
        rows: The rows recorded, also after the end.
    """

    def __init__(
        self,
        every: int = 25,
        quantities: str | Iterable[str] | None = None,
        *,
        to: str | Path | None = None,
        log: Iterable[str] = LOGGED,
        log_every: int = 500,
        keep: int = 200_000,
        part: str = "",
        loss: str = "",
    ):
        self.every, self.quantities, self.to, self.keep, self.part, self.loss = every, quantities, to, keep, part, loss
        self.logged, self.log_every = frozenset(log), log_every  # Lightning sets `log` of a callback
        self.rows = Rows()
        self._recorder: Recorder | None = None
        self._global: dict[int, int] = {}  # recorded step -> step of the optimizer, which loggers use
        self._resumed: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin with a new file, or, in a resumed run, with the old one up to the checkpoint."""
        step = self._resumed.get("step", 0)
        model, sink = pl_module.get_submodule(self.part), self._sink(trainer)
        try:
            loss = pl_module.get_submodule(self.loss) if self.loss else None
        except AttributeError:
            raise unknown((name for name, _ in pl_module.named_modules() if name), self.loss, "module") from None
        recorder = Recorder(model, self.every, self.quantities, loss=loss, to=sink, keep=self.keep, start=step)
        if self.to is not None and trainer.is_global_zero:  # after all checks
            truncate_file(Path(self.to), self._resumed.get("bytes"))
        self._recorder = recorder
        self._recorder.load(self._resumed.get("memory", {}))
        self.rows = self._recorder.rows

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin a step."""
        if self._recorder is not None:
            self._recorder.begin_step()
            if isinstance(batch, Mapping):
                self._recorder.padding.take_masks((), dict(batch))
            if self._recorder.due:
                self._global[self._recorder.step] = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End a step; write and log rows each `log_every` steps."""
        if self._recorder is not None:
            self._recorder.end_forward()
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            if loss is not None and not self.loss:
                self._recorder.add_loss(loss * trainer.accumulate_grad_batches)  # which Lightning has divided by
            if self._recorder.step % self.log_every == 0:
                self.rows.flush()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write and log the last rows, and remove the hooks."""
        if self._recorder is not None:
            self._recorder.close()
            self._resumed = self.state_dict()
            self._recorder = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hooks."""
        self.on_train_end(trainer, pl_module)

    def append(self, rows: Iterable[Row]) -> None:
        """Append rows to the file after training, in place of those that a killed process appended."""
        assert self.to is not None
        truncate_file(Path(self.to), self._resumed.get("bytes"))
        Appender(Path(self.to))(rows)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        if self._recorder is None:
            return self._resumed
        self.rows.flush()
        size = Path(self.to).stat().st_size if self.to is not None and Path(self.to).is_file() else None
        return {"step": self._recorder.step, "memory": self._recorder.state(), "bytes": size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore from a checkpoint."""
        self._resumed = state_dict

    def _sink(self, trainer: Any) -> Callable[[list[Row]], None]:
        append = Appender(Path(self.to)) if self.to is not None and trainer.is_global_zero else None
        loggers = list(trainer.loggers)

        def send(rows: list[Row]) -> None:
            if append is not None:
                append(rows)
            log_rows((row._replace(step=self._global[row.step]) for row in rows), loggers, self.logged)
            self._global = {step: at for step, at in self._global.items() if step >= rows[-1].step}

        return send
