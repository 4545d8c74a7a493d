"""The loss of a model with batch statistics and with running statistics."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normkit._util import require
from normkit.models.calibrate import evaluating
from normkit.models.checks import check_is_model
from normkit.norms import StatNorm, SwitchableNorm


@torch.no_grad()
def train_eval_gap(model: nn.Module, loss: Callable[[], Tensor | float]) -> tuple[float, float]:
    """Measure the loss with the batches' own statistics and with running ones.

    Only norms with batch statistics change their mode; dropout is off in both. Afterwards the model is as before.

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
    check_is_model(model, "train_eval_gap")
    require(callable(loss), "loss", loss, "a function without arguments that computes the loss")
    batch_norms = (StatNorm, SwitchableNorm, nn.modules.batchnorm._BatchNorm)
    before = {module: dict(module._buffers) for module in model.modules()}
    values = {id(t): t.clone() for buffers in before.values() for t in buffers.values() if t is not None}
    try:
        with evaluating(model):
            evaluation = float(loss())
            for module in model.modules():
                if isinstance(module, batch_norms):
                    module.train()
            return float(loss()), evaluation
    finally:
        for module, buffers in before.items():
            for name, buffer in buffers.items():
                module._buffers[name] = buffer  # a forward may have put another in its place
                if buffer is not None and not torch.equal(buffer, values[id(buffer)]):  # else it may share its memory
                    buffer.copy_(values[id(buffer)])
        for module in model.modules():
            if isinstance(module, StatNorm):
                module._reset_counters()
