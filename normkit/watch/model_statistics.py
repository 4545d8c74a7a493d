"""The loss of a whole model by the statistics that its norms use."""

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from normkit.norms import StatNorm


@torch.no_grad()
def train_eval_gap(model: nn.Module, loss: Callable[[], Tensor | float]) -> tuple[float, float]:
    """Measure the loss with the batches' own statistics and with running ones.

    Only norms with batch statistics change their mode; dropout is off in both. Afterwards the model is as before,
    running statistics included.

    Args:
        model: A model.
        loss: Computes the loss by the model, on the same data each time.

    Returns:
        The two losses, which rows name `loss_train_mode` and `loss_eval_mode`.

    >>> import normkit
    >>> model = normkit.make("batch", 2)
    >>> x = torch.tensor([[10.0, 1.0], [12.0, 3.0]])
    >>> train, evaluation = train_eval_gap(model, lambda: model(x).square().mean())
    >>> train < 1.01, evaluation > 50
    (True, True)
    """
    batch_norms = (StatNorm, nn.modules.batchnorm._BatchNorm)
    modes = {module: module.training for module in model.modules()}
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with ExitStack() as stack:
        stack.callback(lambda: [setattr(module, "training", mode) for module, mode in modes.items()])
        stack.callback(lambda: [buffer.copy_(before[name]) for name, buffer in model.named_buffers()])
        model.eval()
        evaluation = float(loss())
        for module in modes:
            if isinstance(module, batch_norms):
                module.train()
        return float(loss()), evaluation
