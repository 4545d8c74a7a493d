"""The statistics of one training step, as forward passes hand them to backward passes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True, weakref_slot=True, eq=False)  # not frozen, which would make it slow to create
class StepStatistics:
    """Decisions of one training forward, for its backward pass and for a recomputed forward.

    Attributes:
        batch: Statistics of this process's batch, `[k, C]`.
        value: Statistics to standardize with, `[k, C]`.
        count: Number of real rows, of all processes if these are synchronized.
        step: Number of this update, counted from 1.
        output_scale: Constant factor on the standardized x, `[C]`; None for 1.
        output_shift: Constant added after `output_scale`, `[C]`; None for 0.
        grad_scale: Constant factor on the gradient, backward only, `[C]`; None for 1.
        dx_scale: Constant factor on dx, `[C]`; None for 1.
        mask: `[...]`, True where a row is real; None if all are.
        saved: Tensors that the norm's `grad_stat` reads.
    """

    batch: Tensor
    value: Tensor
    count: Tensor
    step: Tensor
    output_scale: Tensor | None = None
    output_shift: Tensor | None = None
    grad_scale: Tensor | None = None
    dx_scale: Tensor | None = None
    mask: Tensor | None = None
    saved: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All fields, those of `saved` last."""
        return (
            self.batch, self.value, self.count, self.step, self.output_scale, self.output_shift, self.grad_scale,
            self.dx_scale, self.mask, *self.saved,
        )  # fmt: skip

    @classmethod
    def from_tensors(cls, tensors: tuple[Tensor | None, ...] | list[Tensor | None]) -> "StepStatistics":
        """Inverse of `tensors`."""
        return cls(*tensors[:9], tuple(tensors[9:]))  # type: ignore[arg-type]
