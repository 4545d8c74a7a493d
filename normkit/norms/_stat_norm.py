"""The training step of norms whose statistics outlive the batch."""

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from normkit.kernels import autograd, dispatch, ops, step, sync
from normkit.kernels.cpu import entry as cpu
from normkit.kernels.kernel_rule import KernelRule, find_kernel_rule
from normkit.kernels.step_statistics import StepStatistics
from normkit.norms._base import Split
from normkit.norms._recompute import is_recomputed, snapshot
from normkit.norms._state import StatefulNorm, usable


class Stat(NamedTuple):
    """Decisions of a method for one training forward.

    The output is `weight * (output_scale * z + output_shift) + bias` with the standardized x as z.

    Attributes:
        value: Statistics `[k, C]` to standardize with.
        state: New values of buffers, by name.
        output_scale: Constant factor on the standardized x, forward and backward, `[C]`; None for 1.
        output_shift: Constant added after `output_scale`, `[C]`; None for 0.
        grad_scale: Constant factor on the gradient, backward only, `[C]`; None for 1.
        dx_scale: Constant factor on dx, `[C]`; None for 1.
        saved: Tensors that `grad_stat` reads.
    """

    value: Tensor
    state: dict[str, Tensor]
    output_scale: Tensor | None = None
    output_shift: Tensor | None = None
    grad_scale: Tensor | None = None
    dx_scale: Tensor | None = None
    saved: tuple[Tensor, ...] = ()


class StatNorm(StatefulNorm):
    """Norm whose statistics outlive the batch. A method is two rules on `[k, C]` tensors.

    `train_stat` returns the statistics to standardize with, `grad_stat` the gradient statistics to remove. Both are
    pure: they read the buffers and return their new values. This class does everything else: masks, unusable batches,
    recomputation, several uses in one graph, accumulation, several processes.

    Training is not thread-safe: threads that train with one module lose updates. At inference threads may share it.

    The options of `Norm`, and:

    Args:
        sync: Compute statistics over all processes, or over those of a `torch.distributed` process group, which a spec
            cannot hold; off, as it costs one all-reduce per pass.
        steps_per_update: Training forwards per update of the state, by their joint statistics; for accumulation.
        scalar: Divide all channels by one number, the root of their mean variance or mean square, as when the norms of
            a trained model are removed (Heimersheim 2024); off. A mean that is removed stays one per channel.
    """

    offline: ClassVar[bool] = True
    batch_free: ClassVar[bool] = False
    pad_grad: ClassVar[str] = "exact"  # gradient statistics sum over "exact"ly all rows, or over "real" ones
    groups = 0  # layer-scale: groups of channels of a token, each first divided by its root mean square; 0: none
    scalar: bool = False

    # -- the two rules of a method ------------------------------------------------------------------------------------

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:
        """Return the statistics to standardize with, and the new state.

        Args:
            batch: Statistics of this batch, `[k, C]`.
            step: Number of this update, counted from 1.
            count: Number of real rows.
        """
        raise NotImplementedError

    def grad_stat(self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the gradient statistics to remove, and the new values of buffers.

        Those of the batch, unchanged, give the exact gradient.

        Args:
            batch: Gradient statistics of this batch, `[k, C]`.
            step: Number of this update, counted from 1.
            saved: `Stat.saved` of the forward.
        """
        return batch, {}

    @property
    def uses_batch_gradient(self) -> bool:
        """True if the removed statistics are always this batch's, without any state."""
        return type(self).grad_stat is StatNorm.grad_stat and not self.scalar

    def known_in_advance(self) -> bool:
        """True if the statistics to standardize with and to remove do not depend on the batch.

        A step in C++ then reads `x` once for output and statistics, and the backward reads `dy` and `x` once. False
        also where the host would have to wait for the device.
        """
        return False

    def kernel_rule(self) -> KernelRule | None:
        """Return both rules in the form that kernels apply, or None."""
        return None

    # -- the training step --------------------------------------------------------------------------------------------

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Normalize `x[..., dim]` by the rules of the method; at inference by `running`."""
        if not self.training:
            return self._infer(x)
        return self._train(x.contiguous(), mask)  # kept for the backward pass, too

    def _train(self, x: Tensor, mask: Tensor | None) -> Tensor:
        # the flag itself: before PyTorch 2.12, is_exporting() is True in a graph of torch.compile, too
        if torch.jit.is_tracing() or torch.compiler._is_exporting_flag:  # type: ignore[attr-defined]
            raise RuntimeError("exported and traced graphs lose a norm's training gradient; call model.eval() first")
        eager = not torch.compiler.is_compiling()
        if eager and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
            raise RuntimeError(
                "norms with batch statistics do not train under torch.func or in forward mode; call model.eval() first"
            )
        if self.running.dtype in dispatch.HALVES:
            raise TypeError(f"the statistics are {self.running.dtype}; keep buffers float32 (FSDP: buffer_dtype=None)")
        wide = torch.promote_types(x.dtype, self.running.dtype)
        kernels = dispatch.custom_kernels(x, wide)
        groups = self.groups if kernels is cpu and type(self).rest is StatNorm.rest else 0
        x = x if groups else self.rest(x)  # C++ kernels apply layer-scale on their way
        kernel_rule = find_kernel_rule(self) if kernels and x.numel() else None
        statistics = None
        if is_recomputed():
            with torch.no_grad():
                data = x.detach()
                statistics = self._records.find(
                    data, lambda mask: self.pool(ops.moments(data, mask, self.center, wide, groups, self.eps)[0])
                )
            mask = mask if statistics is None else statistics.mask
        if kernel_rule and kernels and step.can_run(self, x, kernels):
            y, statistics = step.run(self, kernel_rule, x, mask, groups, statistics, kernels)
        else:
            with torch.no_grad():
                statistics = statistics or self._decide(x.detach(), mask, wide, groups)
                statistics = snapshot(statistics) if torch.compiler.is_compiling() else statistics
            affine = (  # kernels would read past the end of a parameter with fewer numbers
                p if p is None or p.shape == (self.dim,) else p.expand(self.dim).contiguous()
                for p in (self.weight, self.bias)
            )
            y = autograd.Standardize.apply(x, *affine, statistics, self, groups)
        self._records.add(statistics, y)
        return y

    def rest(self, x: Tensor) -> Tensor:
        """Transform each token first, in training and at inference: layer-scale, or nothing."""
        return ops.group_rms(x, self.eps, self.groups) if self.groups else x

    def pool(self, statistics: Tensor) -> Tensor:
        """Return statistics `[k, C]`; if `scalar`, with the mean of the last row in all channels."""
        if not self.scalar:
            return statistics
        return torch.cat([statistics[:-1], statistics[-1:].mean(-1, keepdim=True).expand(1, self.dim)])

    def _decide(self, x: Tensor, mask: Tensor | None, wide: torch.dtype, groups: int) -> StepStatistics:
        """Measure the batch, apply the method's rule and update the state."""
        local, count = ops.moments(x, mask, self.center, wide, groups, self.eps)
        batch = local = self.pool(local)
        if groups_of_processes := self.process_groups():
            batch, count = sync.join_processes(local, count, groups_of_processes)
            batch = self.pool(batch)  # again: between batches each channel has its own variance
        ok = usable(batch, count)
        batch = torch.where(ok, batch, self.running.to(batch.dtype))  # not finite, or all padding: as the average batch
        now = self.step + 1
        stat = self.train_stat(batch, now, count)
        value = stat.value.clone()  # it may be a buffer, which changes below
        state, saved, changes = stat.state, tuple(t.clone() for t in stat.saved), ok
        if self.accumulates:  # this batch is standardized by itself; the state changes by all batches together
            turn = getattr(self, "micro_step", now).clone()  # the backward of this batch comes in the same turn
            joint, joint_count, changes = self._accumulate("", batch, count, ok, turn)
            together = self.train_stat(self.pool(joint), now, joint_count)
            state, saved = together.state, (*saved, *(t.clone() for t in together.saved), turn)
        self._commit({**state, "step": now}, changes)
        self.skipped.add_(~ok)
        scales = stat.output_scale, stat.output_shift, stat.grad_scale, stat.dx_scale
        return StepStatistics(local, value, count, now, *scales, mask, saved)

    @torch.no_grad()
    def take_gradient(self, batch: Tensor, count: Tensor, step: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Return the gradient statistics `[k, C]` to remove from dx, and update the state."""
        batch, own = self.pool(batch), len(saved) // (1 + self.accumulates)
        saved, together, turn = saved[:own], saved[own : 2 * own], saved[2 * own :]  # with accumulation, see `_decide`
        value, state = self.grad_stat(batch, step, saved)
        if not state:
            return value
        if not torch.compiler.is_compiling() and type(batch) is Tensor and not torch._C._has_storage(batch):
            raise RuntimeError("gradients under vmap would move this norm's state together; take one after the other")
        ok = changes = usable(batch, count)
        if self.accumulates:
            joint, _, changes = self._accumulate("_grad", batch, count, ok, *turn)
            state = self.grad_stat(joint, step, together)[1]
        self._commit(state, changes)
        self.skipped_grad.add_(~ok)
        return value

    # -- inference ----------------------------------------------------------------------------------------------------

    def _infer(self, x: Tensor) -> Tensor:
        is_plain = type(self).rest is StatNorm.rest and type(self)._affine is StatNorm._affine
        y = ops.infer(self, x) if is_plain else None
        return ops.multiply_add(self.rest(x), *self._affine()) if y is None else y

    def _affine(self) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(self.running[-1] + self.eps)
        shift = -self.running[0] * scale if self.center else torch.zeros_like(scale)
        if self.weight is not None:
            scale, shift = scale * self.weight, shift * self.weight
        return scale, shift if self.bias is None else shift + self.bias

    def split(self) -> Split:
        """Return `Split(identity, scale, shift)`, from the running statistics."""
        return Split(nn.Identity(), *self._affine())
