"""What a launcher started: which of several processes this is, and whether they are as many as a run wants.

Read from the environment, before PyTorch is there. torchrun counts all processes; SLURM its tasks; Lightning, which
starts the processes of a host by itself, is told the host's number in NODE_RANK.
"""

import os

COUNTS = ("SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK")


def first() -> bool:
    """Whether this process is the only one of its run, or the first: the one that speaks, scores and writes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["RANK"]) == 0
    return not any(int(os.environ.get(name, "0")) for name in COUNTS)


def check_launched(devices: int, nodes: int) -> None:
    """ValueError where other processes were started than `devices` on each of `nodes` hosts."""
    there, wanted = os.environ.get, (str(devices), str(devices * nodes))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found = there("LOCAL_WORLD_SIZE"), there("WORLD_SIZE")
        said = f"torchrun started {found[1]} processes, {found[0]} on each host"
    elif "SLURM_NTASKS" in os.environ and there("SLURM_JOB_NAME") not in ("bash", "interactive"):
        every = there("SLURM_NTASKS")
        found = there("SLURM_NTASKS_PER_NODE", "1" if every == "1" else "an unsaid number"), every
        said = f"SLURM started {found[1]} processes, {found[0]} on each host"
    elif wanted[1] == "1" and not first():
        found, count = None, next(name for name in COUNTS if int(there(name, "0")))
        said = f"{count}={there(count)} says that this process is one of several"
    else:
        return
    if found != wanted:
        raise ValueError(
            f"{said}, but the run is for {devices} on each of {nodes} hosts; give --devices and --nodes what the "
            "launcher is given (torchrun: --nproc-per-node and --nnodes; srun: --ntasks-per-node and --nodes), or for "
            "a run on one device start one process, with no such variable"
        )
