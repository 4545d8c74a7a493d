"""PyTorch's fused encoder layer computes a LayerNorm whatever norm it finds; here it is switched off."""

from typing import Any

from torch import nn


def leave_fast_path(model: nn.Module) -> None:
    """Make `nn.TransformerEncoder(Layer)` call its modules at inference too, once a norm of it is no `nn.LayerNorm`.

    At inference PyTorch hands `norm1.weight`, `norm1.bias` and `norm1.eps` to one fused kernel, which would silently
    bypass a new norm. The layer's own condition for that, a flag that its activation is relu or gelu, is lowered.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not _plain(module):
            module.activation_relu_or_gelu = 0
    for module in model.modules():
        layers = getattr(module, "layers", ())
        if isinstance(module, nn.TransformerEncoder) and not all(_plain(layer) for layer in layers):
            module.use_nested_tensor = False


def _plain(layer: nn.Module) -> bool:
    norms: list[Any] = [getattr(layer, "norm1", None), getattr(layer, "norm2", None)]
    return all(type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None for norm in norms)
