"""Small models for tests: parts and a forward in one expression; norms as other libraries write them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def built(forward: Callable, kind: str = "Model", **parts: Any) -> nn.Module:
    """A model of these parts, of a class of this name, with a forward of model and inputs."""
    model = type(kind, (nn.Module,), {"forward": forward})()
    for name, part in parts.items():
        setattr(model, name, part)
    return model


class GemmaRMSNorm(nn.Module):
    """As in transformers: `weight` is the gain less 1."""

    def __init__(self, dim: int):
        super().__init__()
        self.eps, self.weight = 1e-6, nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.weight.shape, 1 + self.weight, self.eps)


class BatchNormAct2d(nn.BatchNorm2d):
    """As in timm: a norm with an activation."""

    def __init__(self, dim: int, act: Callable[[], nn.Module] = nn.PReLU):
        super().__init__(dim)
        self.drop, self.act = nn.Identity(), act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))
