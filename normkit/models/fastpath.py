"""Switch off PyTorch's fused encoder layer, which computes LayerNorm whatever the norm is."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Run encoder layers module by module, on tensors that are not nested."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def leave_fast_path(model: nn.Module) -> None:
    """Make encoder layers call their modules at inference where a norm is no `nn.LayerNorm`.

    At inference `nn.TransformerEncoderLayer` passes `norm1.weight`, `norm1.bias` and `norm1.eps` to one fused kernel,
    which would bypass a new norm. One of its conditions, a flag for the activation, is cleared.
    """
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and not _has_layer_norms(module):
            module.activation_relu_or_gelu = 0
        elif isinstance(module, nn.TransformerEncoder) and not all(map(_has_layer_norms, module.layers)):
            module.use_nested_tensor = False


def _has_layer_norms(layer: nn.Module) -> bool:
    norms: list[Any] = [getattr(layer, "norm1", None), getattr(layer, "norm2", None)]
    return all(type(norm) is nn.LayerNorm and norm.weight is not None and norm.bias is not None for norm in norms)
