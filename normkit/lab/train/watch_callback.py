"""Watch the norms of any LightningModule: rows to a file, and to the loggers that Lightning has."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from normkit.lab.train.lightning import lightning
from normkit.watch import Recorder, Row, Rows
from normkit.watch.row_files import Appender, truncate_file

LOGGED = ("gap_batch", "gap_quadratic", "rms", "largest", "gradient_norm")
"""Quantities that loggers are given unless others are named."""


def log_rows(rows: Iterable[Row], loggers: Iterable[Any], quantities: Iterable[str] = LOGGED) -> None:
    """Hand rows to loggers of Lightning (TensorBoard, W&B, CSV, ...), those of a step in one call, as `quantity/site`.

    Of a run that is over too: `log_rows(normkit.watch.read("runs/mine"), [TensorBoardLogger("logs")])`.
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
    """Record what norms see while Lightning trains: `Trainer(callbacks=[Watch(to="rows.csv")])`.

    As `normkit.record`, each `every` batches. Rows go to the file `to`, if one is named, and each `log_every` batches
    to every logger of the trainer (TensorBoard, W&B, CSV: those that are installed and chosen) as `quantity/site`, at
    Lightning's own global step; `log` says which quantities, none where it is empty. `rows` are those recorded, also
    after the end.
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
    ):
        self.every, self.quantities, self.to, self.keep = every, quantities, to, keep
        self.logged, self.log_every = frozenset(log), log_every  # Lightning sets `log` of a callback
        self.rows = Rows()
        self._recorder: Recorder | None = None
        self._global: dict[int, int] = {}  # steps that are looked at, as Lightning counts: by steps of the optimizer
        self._resumed: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin; a new file, or, where a run is resumed, the old one up to its checkpoint."""
        if self.to is not None and trainer.is_global_zero:
            truncate_file(Path(self.to), self._resumed.get("bytes"))
        step = self._resumed.get("step", 0)
        self._recorder = Recorder(
            pl_module, self.every, self.quantities, to=self._sink(trainer), keep=self.keep, start=step
        )
        self._recorder.load(self._resumed.get("memory", {}))
        self.rows = self._recorder.rows

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A step begins, whatever parts of the module it calls."""
        if self._recorder is not None:
            self._recorder.begin_step()
            if self._recorder.due:
                self._global[self._recorder.step] = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A step ends; now and then its rows are sent on."""
        if self._recorder is not None:
            self._recorder.end_forward()
            if self._recorder.step % self.log_every == 0:
                self.rows.flush()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Send what is left, and take the hooks away."""
        if self._recorder is not None:
            self._recorder.close()
            self._resumed = self.state_dict()
            self._recorder = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave no hooks behind."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on."""
        if self._recorder is None:
            return self._resumed
        self.rows.flush()
        size = Path(self.to).stat().st_size if self.to is not None and Path(self.to).is_file() else None
        return {"step": self._recorder.step, "memory": self._recorder.state(), "bytes": size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._resumed = state_dict

    def _sink(self, trainer: Any) -> Callable[[list[Row]], None]:
        append = None if self.to is None else Appender(Path(self.to))
        loggers = list(trainer.loggers)

        def send(rows: list[Row]) -> None:
            if append is not None:
                append(rows)
            log_rows((row._replace(step=self._global[row.step]) for row in rows), loggers, self.logged)
            self._global = {step: at for step, at in self._global.items() if step >= rows[-1].step}

        return send
