"""A running average of a model's weights, by PyTorch's `AveragedModel`, with a rule for what is no weight.

- parameters are averaged;
- so are statistics and other buffers of floating point (`running`, windows, PyTorch's `running_mean`): they describe
  the features that the averaged weights compute better than those of the last step do;
- whole numbers (steps, counts of what was skipped, `num_batches_tracked`) are the model's own.

At the first update all is copied. What `AveragedModel` does by itself is either to copy all buffers, so that averaged
weights meet the statistics of others, or to average whole numbers too.
"""

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


class _Towards:
    """`average += (1 - decay) * (new - average)`; whole numbers are the new ones."""

    def __init__(self, decay: float):
        self.decay = decay

    @torch.no_grad()
    def __call__(self, averaged: list[Tensor], new: list[Tensor], count: Tensor | int) -> None:
        for old, value in zip(averaged, new, strict=True):
            if old.is_floating_point():
                old.lerp_(value, 1 - self.decay)
            else:
                old.copy_(value)


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """A copy of the model that `update_parameters(model)` moves towards it after each step; without gradients.

    >>> model = nn.BatchNorm1d(1)
    >>> average = moving_average(model, decay=0.75)
    >>> average.update_parameters(model)
    >>> _ = nn.init.constant_(model.weight, 5.0), model.running_mean.fill_(4.0), model.num_batches_tracked.fill_(8)
    >>> average.update_parameters(model)
    >>> [float(average.module.get_buffer(name)) for name in ("running_mean", "num_batches_tracked")]
    [1.0, 8.0]
    >>> float(average.module.weight.detach())
    2.0
    """
    average = AveragedModel(model, multi_avg_fn=_Towards(decay), use_buffers=True)  # type: ignore[reportArgumentType]
    return average.requires_grad_(False).eval()
