"""PN-V, BatchNorm by quadratic means (Shen et al. 2020, arXiv:2003.07845, Definition 1)."""

from typing import Any

from torch import Tensor

from normkit.kernels.rule import KernelRule, Stat
from normkit.norms._options import OldShare
from normkit.norms._stat_norm import StatNorm


class PNV(StatNorm):
    """Divide each channel by its quadratic mean over the batch's real tokens.

    Training `y = weight * x / sqrt(psi_B^2 + eps) + bias` with `psi_B^2 = mean(x^2)` (Eq. 6), exact gradient (Lemma 8);
    inference uses the running `psi^2 <- alpha psi^2 + (1 - alpha) psi_B^2`.

    Args:
        eps: Added to the mean square before the root; absent in the paper, 1e-5 in all released code.
        alpha: Share of the old running statistics per step; 0.9 as in PowerNorm's released code.

    >>> import torch
    >>> PNV(1, eps=0.0)(torch.tensor([[3.0], [-3.0]])).tolist()
    [[1.0], [-1.0]]
    """

    alpha: OldShare = 0.9

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor, state: Any) -> Stat:  # noqa: D102
        return Stat(batch, {"running": self.average(batch, state)})

    def kernel_rule(self, state: Any) -> KernelRule:  # noqa: D102
        return KernelRule("batch", rate=1 - self.alpha)
