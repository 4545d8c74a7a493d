"""Utilization of a GPU by a training run."""

import re

from torch import nn

PEAK = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "L4": 121e12, "RTX 4090": 165e12, "T4": 65e12}
"""Dense bf16 (T4: fp16) operations per second, from data sheets, by words of the device's name."""


def operations(model: nn.Module) -> int:
    """Return operations of a training step per target token: 6 per weight of a linear layer.

    As in Kaplan et al. 2020, section 2.1, without the products of attention. An encoder counts as if sources had as
    many tokens as targets.

    >>> operations(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))
    72
    """
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return 6 * sum(linear.weight.numel() for linear in linears)


def utilization(model: nn.Module, tokens_per_s: float, device: str) -> dict[str, float]:
    """Return operations per second in 1e12, and the fraction of the peak of a known GPU.

    Args:
        model: The model.
        tokens_per_s: Target tokens per second, on one device.
        device: The device's name in a result file.

    >>> utilization(nn.Linear(1, 1), 52e12, "8 x NVIDIA A100-SXM4-80GB")
    {'tflops': 312.0, 'peak_share': 1.0}
    >>> utilization(nn.Linear(1, 1), 52e12, "NVIDIA RTX A1000")
    {'tflops': 312.0}
    """
    rate = operations(model) * tokens_per_s
    peak = next((peak for words, peak in PEAK.items() if re.search(rf"\b{words}\b", device)), None)
    return {"tflops": rate / 1e12} | ({"peak_share": rate / peak} if peak else {})
