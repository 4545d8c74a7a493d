"""Batch normalization of tokens (Ioffe & Szegedy 2015, arXiv:1502.03167)."""

from typing import Any, Literal

import torch
from torch import Tensor

from normkit.kernels.rule import KernelRule, Stat
from normkit.norms._options import OldShare, option
from normkit.norms._stat_norm import StatNorm


class BatchNorm(StatNorm):
    """Center and scale each channel over all real tokens of the batch.

    Training `y = weight * (x - mu_B) / sqrt(var_B + eps) + bias`, biased variance, exact gradient (PowerNorm paper,
    Algorithm 1); `mu <- alpha mu + (1 - alpha) mu_B`, the variance likewise. Inference uses the running `mu` and `var`.

    Args:
        alpha: Share of the old running statistics per step, `1 - momentum` of `torch.nn.BatchNorm1d`; its default.
        running_var: "unbiased" averages variances with n / (n - 1), as torch; "biased" without, as the paper.

    >>> import torch
    >>> BatchNorm(1, eps=0.0)(torch.tensor([[1.0], [3.0]])).tolist()
    [[-1.0], [1.0]]
    """

    center = True

    alpha: OldShare = 0.9
    variance: Literal["unbiased", "biased"] = option(default="unbiased", alias="running_var")

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor, state: Any) -> Stat:  # noqa: D102
        new = batch
        if self.variance == "unbiased":
            bessel = (count / (count - 1).clamp(min=1)).to(batch.dtype)
            new = batch * torch.stack([torch.ones_like(bessel), bessel])[:, None]
        return Stat(batch, {"running": self.average(new, state)})

    def kernel_rule(self, state: Any) -> KernelRule:  # noqa: D102
        return KernelRule("batch", rate=1 - self.alpha, unbiased=self.variance == "unbiased")
