"""Several processes that train one model: how they share it, and which of them writes files.

Lightning starts them (`--devices 2`), or `torchrun` or SLURM have. Each takes its turn of the batches, so that a step
sees `devices x nodes x accumulate x batch_tokens` tokens. Norms with statistics compute them from their own process'
batch, or with `sync=True` in their spec from those of all; the first process' are saved.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from normkit.lab.models.blocks import Layer
from normkit.lab.train.config import Run
from normkit.lab.train.distributed_env import first


def check_gpus(run: Run) -> None:
    """ValueError where a run is for more GPUs than there are."""
    there = torch.cuda.device_count()
    if run.devices > there and (run.device == "cuda" or (run.device == "auto" and there)):
        raise ValueError(
            f"the run is for {run.devices} GPUs, PyTorch finds {there} here; lower --devices or --device cpu"
        )


def strategy(run: Run) -> Any:
    """Lightning's strategy for a run."""
    from lightning.pytorch import strategies

    if run.devices * run.nodes == 1:
        return "auto"
    if run.strategy == "fsdp2":
        return strategies.ModelParallelStrategy(
            data_parallel_size=run.devices * run.nodes, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    return strategies.DDPStrategy(broadcast_buffers=False, find_unused_parameters=run.model.layer_drop > 0)


def cluster() -> list[Any]:
    """Lightning's plugin for SLURM, where it is what started this process, without its own way to begin again.

    That would keep a checkpoint of its own in the run's folder, and a later run there would go on from it unasked.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    if TorchElasticEnvironment.detect() or not SLURMEnvironment.detect():
        return []
    return [SLURMEnvironment(auto_requeue=False)]


def together() -> bool:
    """Whether there are other processes to talk to."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gathered(value: Any) -> list[Any]:
    """What each process has; all must ask. That of this one alone where it is the only one."""
    if not together():
        return [value]
    every: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, value)
    return every


def shard(model: nn.Module, mesh: Any) -> None:
    """FSDP2: each process keeps a part of each layer, and gathers a layer when it is computed; in place."""
    from torch.distributed.fsdp import fully_shard

    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(model: nn.Module, make: Callable[[], nn.Module]) -> nn.Module:
    """The model that the processes hold in parts, as one, on the first of them; a fresh one of `make` on the others."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state, made = get_model_state_dict(model, options=options), make()
    if first():
        made.load_state_dict(state, strict=False)
    return made
