"""Which of several processes this is; asked before PyTorch is."""

import os


def rank() -> int:
    """Number of this process among those that train together; 0 where it is the only one."""
    for variable in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if variable in os.environ:
            return int(os.environ[variable])
    return 0
