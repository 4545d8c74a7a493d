"""Norms whose statistics outlive the batch: a method is two rules."""

from typing import Any, ClassVar

from torch import Tensor, nn

from normkit.kernels import ops, reference
from normkit.kernels.rule import KernelRule, Stat
from normkit.norms._base import Split
from normkit.norms._state import StatefulNorm


class StatNorm(StatefulNorm):
    """Norm whose statistics outlive the batch. A method is two rules on `[k, C]` tensors.

    `train_stat` returns the statistics to standardize with, `grad_stat` the gradient statistics to remove. Both are
    pure: they read the buffers as attributes of `state` and return their new values. `kernels.ops.train_step` does
    everything else: masks, unusable batches, recomputation, several uses in one graph, accumulation, several processes.

    Training is not thread-safe: threads that train with one module lose updates. At inference threads may share it.

    The options of `Norm`, and:

    Args:
        sync: Compute statistics over all processes, or over those of a `torch.distributed` process group, which a spec
            cannot hold; off, as it costs one all-reduce per pass.
    """

    offline: ClassVar[bool] = True
    batch_free: ClassVar[bool] = False
    pad_grad: ClassVar[str] = "exact"  # gradient statistics sum over "exact"ly all rows, or over "real" ones
    groups = 0  # layer-scale: groups of channels of a token, each first divided by its root mean square; 0: none

    # -- the two rules of a method ------------------------------------------------------------------------------------

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor, state: Any) -> Stat:
        """Return the statistics to standardize with, and the new state.

        Args:
            batch: Statistics of this batch, `[k, C]`.
            step: Number of this update, counted from 1.
            count: Number of real rows.
            state: The buffers, as attributes.

        Returns:
            A `Stat` with value `[k, C]`: mean and variance (k = 2), or mean square (k = 1).
        """
        raise NotImplementedError

    def grad_stat(
        self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...], state: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient statistics to remove, and the new values of buffers.

        Those of the batch, unchanged, give the exact gradient.

        Args:
            batch: Gradient statistics of this batch, `[k, C]`.
            step: Number of this update, counted from 1.
            saved: `Stat.saved` of the forward.
            state: The buffers, as attributes.

        Returns:
            Statistics `[k, C]`, and new values by the names of buffers.
        """
        return batch, {}

    def average(self, batch: Tensor, state: Any) -> Tensor:
        """Return the running statistics after this batch: `alpha * running + (1 - alpha) * batch`."""
        return state.running.lerp(batch.to(state.running.dtype), 1 - self.alpha)

    def known_in_advance(self, state: Any) -> bool:
        """Return True if the statistics to standardize with and to remove do not depend on the batch.

        A step in C++ then reads `x` once for output and statistics, and the backward reads `dy` and `x` once. False
        also where the host would have to wait for the device.
        """
        return False

    def known_end(self, state: Any) -> int:
        """Return the last step of the warm-up, `NEVER` until the host has seen it; 0 without one."""
        return 0

    def kernel_rule(self, state: Any) -> KernelRule | None:
        """Return both rules in the form that kernels apply, or None."""
        return None

    # -- training and inference ---------------------------------------------------------------------------------------

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Normalize `x[..., dim]` by the rules of the method; at inference by `running`."""
        if self.training:
            return ops.train_step(x, mask, self)
        return ops.standardize(x, self.running, self.weight, self.bias, self.eps, self.groups)

    def rest(self, x: Tensor) -> Tensor:
        """Transform each token first, in training and at inference: layer-scale, or nothing."""
        return ops.group_rms(x, self.eps, self.groups) if self.groups else x

    def split(self) -> Split:
        """Return `Split(identity, scale, shift)`, from the running statistics."""
        return Split(nn.Identity(), *reference.scale_and_shift(self.running, self.weight, self.bias, self.eps))
