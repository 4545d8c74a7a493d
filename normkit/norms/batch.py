"""Batch normalization of tokens (Ioffe & Szegedy 2015, arXiv:1502.03167; PowerNorm paper, Algorithm 1)."""

from typing import Literal

import torch
from torch import Tensor

from normkit.kernels.kernel_rule import KernelRule
from normkit.norms._base import Stat, StatNorm
from normkit.norms._require import require, require_fraction


class BatchNorm(StatNorm):
    """Centre and scale each channel over all real tokens of the batch; running statistics at inference.

    Training `y = weight * (x - mu_B) / sqrt(var_B + eps) + bias`, biased variance, exact gradient;
    `mu <- alpha mu + (1 - alpha) mu_B`, likewise the variance: with n / (n - 1) when `running_var="unbiased"`, as
    `torch.nn.BatchNorm1d` (whose `momentum` is `1 - alpha`), without when "biased", as the paper.

    >>> import torch
    >>> BatchNorm(1, eps=0.0)(torch.tensor([[1.0], [3.0]])).tolist()
    [[-1.0], [1.0]]
    """

    center = True

    def __init__(
        self,
        dim: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        sync: bool = False,
        steps_per_update: int = 1,
        alpha: float = 0.9,
        running_var: Literal["unbiased", "biased"] = "unbiased",
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias, sync=sync, steps_per_update=steps_per_update)
        require_fraction("alpha", alpha)
        require(running_var in ("unbiased", "biased"), "running_var", running_var, '"unbiased" or "biased"')
        self.alpha, self.running_var = alpha, running_var

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:  # noqa: D102
        new = batch
        if self.running_var == "unbiased":
            bessel = (count / (count - 1).clamp(min=1)).to(batch.dtype)
            new = batch * torch.stack([torch.ones_like(bessel), bessel])[:, None]
        return Stat(batch, {"running": self.running.lerp(new.to(self.running.dtype), 1 - self.alpha)})

    def kernel_rule(self) -> KernelRule:  # noqa: D102
        return KernelRule("batch", rate=1 - self.alpha, unbiased=self.running_var == "unbiased")
