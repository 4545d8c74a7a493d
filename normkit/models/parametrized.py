"""Plain weights in place of PyTorch's parametrizations, such as weight normalization."""

from typing import Any

from torch import nn
from torch.nn.utils import parametrize

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)


def plain_weights(model: nn.Module) -> nn.Module:
    """Replace parametrized weights by those of inference, in place; shared ones stay shared.

    Examples:
        >>> plain_weights(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))))[0]
        Linear(in_features=4, out_features=3, bias=True)
    """
    module: Any
    plain: dict[Any, Any] = {}  # of modules that share a matrix, the weight and what it came from
    for module in list(model.modules()):
        steps: Any = getattr(module, "parametrizations", {})
        if isinstance(module, LAYERS) and list(steps) == ["weight"]:
            steps.eval()
            weight = nn.Parameter(module.weight.detach(), any(p.requires_grad for p in steps.parameters()))
            tensors = *steps.parameters(), *steps.buffers()
            weight = plain.setdefault((*map(type, steps.weight), *map(id, tensors)), (weight, tensors))[0]
            module.__class__ = parametrize.type_before_parametrizations(module)  # copies share the class: leave it be
            del module.parametrizations
            module.weight = weight
    return model
