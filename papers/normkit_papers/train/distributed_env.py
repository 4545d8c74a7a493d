"""Environment variables of launchers: rank of this process, number of processes.

They are read before PyTorch is imported. torchrun counts all processes, SLURM its tasks. Lightning starts the
processes of a node itself and reads the node's number from NODE_RANK.
"""

import os

RANKS = ("SLURM_PROCID", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK")


def is_rank_zero() -> bool:
    """Return True in the only process of a run, or in the first: it prints, scores and writes."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["RANK"]) == 0
    return not any(int(os.environ.get(name, "0")) for name in RANKS)


def check_launched(devices: int, nodes: int) -> None:
    """Check that a launcher started as many processes as the run needs.

    Args:
        devices: Processes on each node.
        nodes: Nodes.

    Raises:
        ValueError: If another number of processes was started.
    """
    get, needed = os.environ.get, (str(devices), str(devices * nodes))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        found = get("LOCAL_WORLD_SIZE"), get("WORLD_SIZE")
        started = f"torchrun started {found[1]} processes, {found[0]} on each host"
    elif "SLURM_NTASKS" in os.environ and get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        every = get("SLURM_NTASKS")
        found = get("SLURM_NTASKS_PER_NODE", "1" if every == "1" else "an unknown number"), every
        started = f"SLURM started {found[1]} processes, {found[0]} on each host"
    elif needed[1] == "1" and not is_rank_zero():
        found, rank = None, next(name for name in RANKS if int(get(name, "0")))
        started = f"{rank}={get(rank)} means that this process is one of several"
    else:
        return
    if found != needed:
        raise ValueError(
            f"{started}, but the run is for {devices} on each of {nodes} hosts; give --devices and --nodes the numbers "
            "of the launcher (torchrun: --nproc-per-node and --nnodes; srun: --ntasks-per-node and --nodes), or for "
            "a run on one device start one process, without such a variable"
        )
