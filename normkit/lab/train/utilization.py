"""What share of a GPU's arithmetic a training run used."""

import torch
from torch import nn

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "T4": 65e12}
"""Dense bf16 (T4: fp16) operations a second, from the makers' data sheets, by a part of the device's name."""


def operations(model: nn.Module) -> int:
    """Floating-point operations of one training step a target token: 6 for each weight that multiplies it.

    The weights are those of linear maps; an encoder is counted as if sources had as many tokens as targets, attention's
    products of tokens with tokens are left out, as in Kaplan et al. 2020, section 2.1.

    >>> operations(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    72
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return 6 * sum(linear.weight.numel() for linear in linears)


def utilization(model: nn.Module, tokens_per_s: float) -> dict[str, float]:
    """Operations a second, in 1e12, and on a GPU of the table their share of its peak."""
    rate = operations(model) * tokens_per_s
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for part, peak in PEAK.items() if part in name), None)
    return {"tflops": rate / 1e12} | ({"peak_share": rate / peak} if peak else {})
