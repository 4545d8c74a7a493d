"""Moving average of a model's weights by PyTorch's `AveragedModel`, with buffers.

- parameters are averaged;
- so are floating-point buffers (statistics, windows, PyTorch's `running_mean`): averages describe the features of the
  averaged weights better than the statistics of the last step do;
- integers (steps, counters, `num_batches_tracked`) are copied.

The first update copies everything. `AveragedModel` by default copies all buffers, so that averaged weights get
statistics of other weights, or averages integers too.
"""

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """Return an average of the model, without gradients.

    `update_parameters(model)` updates it after each step.

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

    def update(averaged: list[Tensor], new: list[Tensor], count: Tensor | int) -> None:
        for old, value in zip(averaged, new, strict=True):
            if old.is_floating_point():
                old.lerp_(value, 1 - decay)
            else:
                old.copy_(value)

    average = AveragedModel(model, multi_avg_fn=update, use_buffers=True)  # type: ignore[reportArgumentType]
    return average.requires_grad_(False).eval()
