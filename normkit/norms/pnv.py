"""PN-V: BatchNorm by quadratic means (Shen et al. 2020, arXiv:2003.07845, Definition 1)."""

from torch import Tensor

from normkit.kernels.kernel_rule import KernelRule
from normkit.norms._base import Stat, StatNorm
from normkit.norms._require import require_fraction


class PNV(StatNorm):
    """Divide each channel by its quadratic mean over the batch's real tokens; the running one at inference.

    Training `y = weight * x / sqrt(psi_B^2 + eps) + bias` with `psi_B^2 = mean(x^2)` (Eq. 6), exact gradient (Lemma 8);
    `psi^2 <- alpha psi^2 + (1 - alpha) psi_B^2` for inference. The paper has no eps; every code puts it in the root.

    >>> import torch
    >>> PNV(1, eps=0.0)(torch.tensor([[3.0], [-3.0]])).tolist()
    [[1.0], [-1.0]]
    """

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
    ):
        super().__init__(dim, eps=eps, affine=affine, bias=bias, sync=sync, steps_per_update=steps_per_update)
        require_fraction("alpha", alpha)
        self.alpha = alpha

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:  # noqa: D102
        return Stat(batch, {"running": self.average(batch)})

    def kernel_rule(self) -> KernelRule:  # noqa: D102
        return KernelRule("batch", rate=1 - self.alpha)
