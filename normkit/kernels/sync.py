"""Statistics as sums that add up over batches and over processes."""

import torch
from torch import Tensor


def pack(batch: Tensor, count: Tensor, origin: Tensor) -> Tensor:
    """Convert statistics to sums `[k * C + 1]` that can be added; the count is last.

    With a mean, second moments are taken about `origin[0]`, so that the variance survives the subtraction.
    """
    if len(batch) == 2:
        offset = batch[0] - origin[0]
        batch = torch.stack([offset, batch[1] + offset.square()])
    return torch.cat([(batch * count).flatten(), count.view(1)])


def unpack(sums: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
    """Convert added sums of `pack` to joint statistics `[k, C]` and the joint count."""
    count = sums[-1]
    batch = sums[:-1].view_as(origin) / count.clamp(min=1)
    if len(batch) == 2:
        batch = torch.stack([batch[0] + origin[0], (batch[1] - batch[0].square()).clamp(min=0)])
    return batch, count


def is_distributed() -> bool:
    """True if several processes are connected."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def all_reduce(sums: Tensor) -> Tensor:
    """Sum over all processes of the default group; the tensor itself without a group."""
    if not is_distributed():
        return sums
    from torch.distributed._functional_collectives import all_reduce, wait_tensor

    return wait_tensor(all_reduce(sums, "sum", torch.distributed.group.WORLD))  # type: ignore[arg-type]
