"""Joint statistics of several batches and of several processes."""

import torch
from torch import Tensor


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


def join_processes(batch: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the batches of all processes, and the number of their rows.

    The sums are in float64: in float32 a variance would be lost beside the square of a large mean.
    """
    wide = batch.double()
    if len(batch) == 2:
        wide = torch.stack([wide[0], wide[1] + wide[0].square()])
    sums = all_reduce(torch.cat([(wide * count).flatten(), count.double().view(1)]))
    joint = sums[:-1].view_as(batch) / sums[-1].clamp(min=1)
    if len(batch) == 2:
        joint = torch.stack([joint[0], (joint[1] - joint[0].square()).clamp(min=0)])
    return joint.to(batch.dtype), sums[-1].to(count.dtype)


def is_distributed() -> bool:
    """True if several processes are connected."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def all_reduce(sums: Tensor) -> Tensor:
    """Sum over all processes of the default group; the tensor itself without a group."""
    if not is_distributed():
        return sums
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    return wait_tensor(all_reduce(sums, "sum", torch.distributed.group.WORLD))  # type: ignore[arg-type]
