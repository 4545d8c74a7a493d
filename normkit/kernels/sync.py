"""Joint statistics of several batches and of several processes."""

from typing import Any

import torch
from torch import Tensor

Groups = tuple[Any, ...]  # of `torch.distributed.ProcessGroup`; sums run over one after the other


def join(stat: Tensor, count: Tensor, more: Tensor, more_count: Tensor, center: bool) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of two sets of rows together, and the number of rows.

    With `center` the rows are mean and variance, to which the distance of the means adds (Chan, Golub & LeVeque 1979);
    else both are means. A count of 0 is an empty set.

    >>> mean_and_variance = torch.tensor([[1.0], [0.0]]), torch.tensor(1.0), torch.tensor([[3.0], [0.0]])
    >>> join(*mean_and_variance, torch.tensor(1.0), center=True)
    (tensor([[2.],
            [1.]]), tensor(2.))
    """
    both = count + more_count
    share = more_count / both.clamp(min=1)
    joint = stat.lerp(more, share)
    if center:
        apart = (more[0] - stat[0]).square() * share * (1 - share)
        joint = torch.stack([joint[0], joint[1] + apart])
    return joint, both


def join_processes(batch: Tensor, count: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the batches of all processes, and the number of their rows.

    The sums are in float64: in float32 a variance would be lost beside the square of a large mean.
    """
    wide = batch.double()
    if len(batch) == 2:
        wide = torch.stack([wide[0], wide[1] + wide[0].square()])
    sums = all_reduce(torch.cat([(wide * count).flatten(), count.double().view(1)]), groups)
    joint = sums[:-1].view_as(batch) / sums[-1].clamp(min=1)
    if len(batch) == 2:
        joint = torch.stack([joint[0], (joint[1] - joint[0].square()).clamp(min=0)])
    return joint.to(batch.dtype), sums[-1].to(count.dtype)


def is_distributed() -> bool:
    """True if several processes are connected."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def groups_of(sync: Any) -> Groups:
    """Return the group of an option `sync`: all processes for True, none without several processes."""
    if sync is False or not is_distributed():
        return ()
    return (torch.distributed.group.WORLD if sync is True else sync,)


def is_group(value: object) -> bool:
    """Return True for a process group that has this process."""
    return torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup)


def includes(group: Any, other: Any) -> bool:
    """Return True if a group has all processes of another."""
    return {*torch.distributed.get_process_group_ranks(other)} <= {*torch.distributed.get_process_group_ranks(group)}


def all_reduce(sums: Tensor, groups: Groups) -> Tensor:
    """Sum over the processes of each group."""
    if not groups:
        return sums
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    for group in groups:
        sums = wait_tensor(all_reduce(sums, "sum", group))
    return sums
