"""Calibrate a saved run: replace running statistics by those of training batches."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from normkit.norms import StatNorm
from normkit_papers.train.folder import Loaded
from normkit_papers.train.source import open_task


class Calibration(NamedTuple):
    """Outcome: numbers of norms and of training batches, validation loss before and after."""

    norms: int
    batches: int
    loss_before: float
    loss_after: float

    def __str__(self) -> str:
        return (
            f"calibrated {self.norms} norms on {self.batches} training batches; "
            f"validation loss {self.loss_before:.4f} before, {self.loss_after:.4f} after"
        )


def calibrate_run(
    loaded: Loaded,
    batches: int | None = None,
    track: Callable[[Iterable[Any], int], Iterable[Any]] = lambda batches, total: batches,
) -> tuple[Loaded, Calibration]:
    """Compute the statistics of a run's norms again, from training batches; its model is not changed.

    Args:
        loaded: The run.
        batches: Number of training batches; None for as many as training uses for its calibrated scores.
        track: Yields the same batches, and shows how many of `total` have been read.

    Raises:
        ValueError: If the model has no norm with batch statistics, or the run's data is missing.
    """
    run, model, vocabularies = loaded
    count = sum(isinstance(module, StatNorm) for module in model.modules())
    if not count:
        raise ValueError(f"run {run.name} has no norm with batch statistics, so there is nothing to calibrate")
    if batches is not None and not 1 <= batches <= run.steps:
        raise ValueError(f"batches must be at least 1 and at most the run's {run.steps:,} steps; got {batches}")
    task = open_task(loaded)
    number: int = batches or task.calibration_batches
    before = task.validate()["loss"]
    with task.calibrated(track(itertools.islice(task.batches(0), number), number)):
        calibrated = task.model.eval()
        after = task.validate()["loss"]
    return Loaded(run, calibrated, vocabularies), Calibration(count, number, before, after)
