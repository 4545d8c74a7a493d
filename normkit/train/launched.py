"""What a launcher started: which of several processes this is, and whether they are as many as a run wants.

Read from the environment, before PyTorch is there. torchrun counts all processes; SLURM its tasks; Lightning, which
starts the processes of a host by itself, is told the host's number in NODE_RANK.
"""

import os


def first() -> bool:
    """Whether this process is the only one of its run, or the first: the one that speaks, scores and writes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["RANK"]) == 0
    names = ("SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK")
    return not any(int(os.environ.get(name, "0")) for name in names)


def check_launched(devices: int, nodes: int) -> None:
    """ValueError where a launcher started other processes than `devices` on each of `nodes` hosts."""
    there = os.environ.get
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher, each, every = "torchrun", there("LOCAL_WORLD_SIZE"), there("WORLD_SIZE")
    elif "SLURM_NTASKS" in os.environ and there("SLURM_JOB_NAME") not in ("bash", "interactive"):
        launcher, every = "SLURM", there("SLURM_NTASKS")
        each = there("SLURM_NTASKS_PER_NODE", "1" if every == "1" else "an unsaid number")
    else:
        return
    if (each, every) != (str(devices), str(devices * nodes)):
        raise ValueError(
            f"{launcher} started {every} processes, {each} on each host, but the run is for {devices} on each of "
            f"{nodes} hosts; give --devices and --nodes what the launcher is given (torchrun: --nproc-per-node and "
            "--nnodes; srun: --ntasks-per-node and --nodes), or start one process for a run on one device"
        )
