"""Training with several processes: strategy and exchange of values.

Lightning starts the processes (`--devices 2`), or `torchrun` does. They take turns in reading batches, so a step uses
`devices x accumulate x batch_tokens` tokens. Norms compute statistics from their process' batch, or
with `sync=True` in their spec from all of them; those of rank 0 are saved.
"""

import os
from typing import Any

import torch

from normkit_papers.train.config import Run


def is_rank_zero() -> bool:
    """Return True in the only process of a run, or in the first: it prints, scores and writes."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def device_type(device: str) -> str:
    """Return "cuda" or "cpu" for a run's `device`; Apple's GPUs have no float64."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def check_devices(run: Run) -> None:
    """Raise a ValueError if a run needs GPUs or processes that are not there."""
    there, cores = torch.cuda.device_count(), os.cpu_count() or 1
    on_gpus = device_type(run.device) == "cuda"
    if on_gpus and run.devices > there:
        raise ValueError(
            f"the run is for {run.devices} GPUs, PyTorch finds {there} here; give --device cpu, or --devices"
        )
    if run.devices > 4 * cores and not on_gpus:
        raise ValueError(f"the run is for {run.devices} processes, and this machine has {cores} cores; give --devices")
    if "TORCHELASTIC_RUN_ID" in os.environ or not is_rank_zero():  # another rank would train and write nothing
        started = os.environ.get("WORLD_SIZE", "several")
        if started != str(run.devices):
            raise ValueError(f"{started} processes were started, and the run is for {run.devices}; give --devices")


def make_strategy(run: Run) -> Any:
    """Return Lightning's strategy for a run."""
    from lightning.pytorch import strategies

    if run.devices == 1:
        return "auto"
    return strategies.DDPStrategy(broadcast_buffers=False, find_unused_parameters=run.model.layer_drop > 0)


def all_gather(value: Any) -> list[Any]:
    """Return the values of all processes, which must all call this; of one, its own."""
    if not torch.distributed.is_initialized():
        return [value]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, value)
    return every
