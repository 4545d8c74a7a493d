"""Calibrate a saved run: replace running statistics by those of training batches."""

import itertools
from typing import NamedTuple

from normkit.lab.train.folder import Loaded
from normkit.lab.train.source import open_task
from normkit.norms import StatNorm


class Calibration(NamedTuple):
    """Outcome of a calibration.

    Attributes:
        norms: Number of norms with new statistics.
        batches: Number of training batches, at most.
        loss_before: Validation loss with the running statistics of training.
        loss_after: Validation loss with the new statistics.
    """

    norms: int
    batches: int
    loss_before: float
    loss_after: float

    def __str__(self) -> str:
        return (
            f"calibrated {self.norms} norms on {self.batches} training batches; "
            f"validation loss {self.loss_before:.4f} before, {self.loss_after:.4f} after"
        )


def calibrate_run(loaded: Loaded, batches: int | None = None) -> tuple[Loaded, Calibration]:
    """Compute the statistics of a run's norms again, from training batches.

    Args:
        loaded: The run. Its model is not changed.
        batches: Number of training batches; None for as many as training uses for its calibrated scores.

    Raises:
        ValueError: If the model has no norm with batch statistics, or the run's data is missing.
    """
    run, model, vocabularies = loaded
    count = sum(isinstance(module, StatNorm) for module in model.modules())
    if not count:
        raise ValueError(f"run {run.name} has no norm with batch statistics, so there is nothing to calibrate")
    if batches is not None and batches < 1:
        raise ValueError(f"batches must be at least 1; got {batches}")
    task = open_task(loaded)
    number: int = batches or task.calibration_batches
    before = task.validate()["loss"]
    with task.calibrated(itertools.islice(task.batches(0), number)):
        calibrated = task.model.eval()
        after = task.validate()["loss"]
    return Loaded(run, calibrated, vocabularies), Calibration(count, number, before, after)
