"""Order of axes in memory: kernels compute on rows, and every result gets the order of its input.

A model whose next layer calls `y.view(...)`, or whose convolutions run in one memory format, relies on that.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def order(x: Tensor) -> tuple[int, ...]:
    """Return the axes of `x` from the largest stride to the smallest."""
    shape, strides = x.shape, x.stride()
    axes = tuple(range(len(shape)))
    if any(stride == 0 < size - 1 for size, stride in zip(shape, strides, strict=True)):
        return axes  # an expanded tensor: no order of its own
    return tuple(sorted(axes, key=lambda axis: (-strides[axis], shape[axis] == 1)))


def has_rows(x: Tensor) -> bool:
    """Return True if the axes of `x` are in the order of memory, so that its rows follow each other."""
    return x.is_contiguous() or order(x) == tuple(range(x.dim()))


def like(y: Tensor, x: Tensor) -> Tensor:
    """Return `y` with its axes in memory in the order of those of `x`, which has the same shape."""
    if y.stride() == x.stride() or _is_transformed():
        return y
    axes = order(x)
    return y if order(y) == axes else _ordered(y, axes)


def gradient_like(x: Tensor) -> Tensor:
    """Return `x`; its gradient will have its axes in memory in the order of those of `x`."""
    if not (x.requires_grad and torch.is_grad_enabled()) or _is_transformed() or order(x) == tuple(range(x.dim())):
        return x
    return SameOrder.apply(x)  # type: ignore[return-value]


class SameOrder(torch.autograd.Function):
    """The identity, whose gradient has the order of `x`."""

    @staticmethod
    def forward(ctx, x):  # noqa: D102
        ctx.axes = order(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dx):  # type: ignore[override]  # noqa: D102
        return dx if order(dx) == ctx.axes else _ordered(dx, ctx.axes)


def _ordered(y: Tensor, axes: tuple[int, ...]) -> Tensor:
    back = sorted(range(len(axes)), key=axes.__getitem__)
    return y.permute(axes).contiguous().permute(back)


def _is_transformed() -> bool:
    """True under functional transforms and in forward mode, where strides are not those of memory."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
