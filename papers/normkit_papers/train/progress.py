"""Progress of a run, for its observers."""

from typing import NamedTuple


class Progress(NamedTuple):
    """Progress of a run; `stage` is "training", later what is done with the trained model."""

    stage: str
    step: int
    steps: int
    loss: float = float("nan")  # mean training loss since the last progress
    tokens_per_s: float = 0.0
    seconds_left: float | None = None  # None until speed has been measured
    unit: str = "tokens"  # or images, see TaskSpec.unit
