"""What a run tells those who wait for it."""

from typing import NamedTuple


class Progress(NamedTuple):
    """How far a run is; `stage` is "training", later what is being done with the trained model."""

    stage: str
    step: int
    steps: int
    loss: float = float("nan")  # mean training loss since the last time
    tokens_per_s: float = 0.0
    seconds_left: float = 0.0
    unit: str = "tokens"  # or images, as the task has it
