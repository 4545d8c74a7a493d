"""Environment variables of launchers: the rank of this process.

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
