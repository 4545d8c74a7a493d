"""Weight and spectral normalization: parametrizations in place of norms of activations."""

import copy
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from normkit._util import require, require_functions

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)


def weight_norm(model: nn.Module, initialize: Callable[[], Any] | None = None, layers: str = "*") -> nn.Module:
    """Give layers weight normalization `W = g v / ||v||`, in place (Salimans & Kingma 2016).

    Linear and convolution layers learn a length `g` and a direction `v` for each output channel. Layers whose weight
    another module shares stay as they are.

    Args:
        model: The model, which is returned.
        initialize: Runs the model on one batch, best without dropout. Each layer in turn then gets the `g` and the
            bias with which its outputs have mean 0 and variance 1 (Eq. 5 and 6). None keeps the present weights.
        layers: Pattern of layer names; ValueError if none matches.

    >>> model, x = nn.Sequential(nn.Linear(4, 3)), torch.randn(50, 4)
    >>> bool(weight_norm(model, lambda: model(x))(x).mean(0).abs().max() < 1e-5)
    True
    """
    require_functions(initialize=initialize)
    found = _matching(model, layers, rows=True)
    before = {layer: copy.deepcopy(layer.state_dict()) for layer in found}
    for layer in found:
        parametrizations.weight_norm(layer)
    handles: dict[nn.Module, Any] = {}

    def start(layer: Any, args: Any, kwargs: dict[str, Any], y: Tensor) -> Tensor:
        handles.pop(layer).remove()  # a layer that runs twice keeps what its first call gave it
        rows = y if layer.weight.dim() == 2 else y.movedim(1 - layer.weight.dim(), -1)
        std, mean = torch.std_mean(rows.reshape(-1, rows.shape[-1]), 0, correction=0)
        std, length = torch.where(std > 0, std, 1), layer.parametrizations.weight.original0
        length.div_(std.view_as(length))
        if layer.bias is not None:
            layer.bias.sub_(mean).div_(std)
        return layer.forward(*args, **kwargs)

    if initialize is not None:
        with ExitStack() as hooks, torch.no_grad():
            for layer in found:
                handles[layer] = hooks.enter_context(layer.register_forward_hook(start, with_kwargs=True))
            try:
                initialize()
            except BaseException:
                for layer in found:
                    parametrize.remove_parametrizations(layer, "weight").load_state_dict(before[layer])
                raise
    return model


def spectral_norm(model: nn.Module, layers: str = "*") -> nn.Module:
    """Give layers spectral normalization `W / sigma(W)`, in place (Miyato et al. 2018).

    The largest singular value is estimated by 15 power iterations now and one in each training forward, as in the
    paper. At inference it is frozen. `layers` and the layers that stay are as for `weight_norm`.

    >>> model = spectral_norm(nn.Sequential(nn.Linear(4, 3)))
    >>> round(float(torch.linalg.matrix_norm(model[0].weight, 2).detach()), 2)
    1.0
    """
    for layer in _matching(model, layers, rows=False):
        parametrizations.spectral_norm(layer)
    return model


def fold_weights(model: nn.Module) -> nn.Module:
    """Replace parametrized weights by those that they give at inference, in place.

    `fold` does this in its copy first, so that norms of activations fold into these layers, too.

    >>> fold_weights(spectral_norm(nn.Sequential(nn.Linear(4, 3))))[0]
    Linear(in_features=4, out_features=3, bias=True)
    """
    require(isinstance(model, nn.Module), "model", model, "an nn.Module")
    module: Any
    plain: dict[Any, Any] = {}  # of modules that share a matrix, the weight and what it came from
    for module in list(model.modules()):
        steps: Any = getattr(module, "parametrizations", {})
        if isinstance(module, (*LAYERS, nn.Embedding)) and list(steps) == ["weight"]:
            steps.eval()
            weight = nn.Parameter(module.weight.detach(), any(p.requires_grad for p in steps.parameters()))
            tensors = *steps.parameters(), *steps.buffers()
            weight = plain.setdefault((*map(type, steps.weight), *map(id, tensors)), (weight, tensors))[0]
            module.__class__ = parametrize.type_before_parametrizations(module)  # copies share the class: leave it be
            del module.parametrizations
            module.weight = weight
    return model


def _matching(model: nn.Module, layers: str, rows: bool) -> list[Any]:
    require(isinstance(model, nn.Module), "model", model, "an nn.Module")
    require(isinstance(layers, str), "layers", layers, "a pattern of names of layers, such as 'encoder.*'")
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values())
    named = [(name, module) for name, module in model.named_modules() if isinstance(module, LAYERS)]
    named = [(name, module) for name, module in named if not parametrize.is_parametrized(module)]
    found = {name: module for name, module in named if fnmatchcase(name, layers) and owners[id(module.weight)] == 1}
    if not found:
        raise ValueError(f"no Linear or convolution layer with a weight of its own is called {layers}")
    for name, module in found.items():
        if module.weight.is_meta:
            raise ValueError(f"{name} is on the meta device, so its weight has no values; load them first")
        zero = (module.weight.flatten(1) == 0).all(1)
        if zero.any() if rows else zero.all():
            raise ValueError(f"{name} has {int(zero.sum())} output channels of zeros, which have no direction")
    return list(found.values())
