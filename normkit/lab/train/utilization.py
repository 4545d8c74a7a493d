"""Utilization of a GPU by a training run."""

import torch
from torch import nn

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "T4": 65e12}
"""Dense bf16 (T4: fp16) operations per second, from data sheets, by a part of the device's name."""


def operations(model: nn.Module) -> int:
    """Return operations of a training step per target token: 6 per weight of a linear layer.

    As in Kaplan et al. 2020, section 2.1, without the products of attention. An encoder counts as if sources had as
    many tokens as targets.

    >>> operations(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    72
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return 6 * sum(linear.weight.numel() for linear in linears)


def utilization(model: nn.Module, tokens_per_s: float) -> dict[str, float]:
    """Return operations per second in 1e12, and the fraction of a known GPU's peak."""
    rate = operations(model) * tokens_per_s
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((peak for part, peak in PEAK.items() if part in name), None)
    return {"tflops": rate / 1e12} | ({"peak_share": rate / peak} if peak else {})
