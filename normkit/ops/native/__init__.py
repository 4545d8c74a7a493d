"""Kernels in C++ for eager arithmetic on a CPU: each pass over the activations reads and writes them once.

`kernels.cpp` is compiled on first use where there is a compiler (`build.py`); without one PyTorch's own kernels are put
to other uses (`ops/fused.py`). Tensors are float32 or bfloat16, vectors `[C]` float32.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.ops import fused
from normkit.ops.native.build import library, obstacle

__all__ = ["DTYPES", "divide", "flops", "gradient", "library", "listeners", "moments", "obstacle", "standardize"]

DTYPES = (torch.float32, torch.bfloat16)
listeners: list[Callable[[str, dict], object]] = []  # told the name and the arguments of every kernel that is called


def moments(x: Tensor, mask: Tensor | None, center: bool, groups: int = 0, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the real rows of `x`, after layer-scale where there are groups, and their number."""
    stat, count = _vectors(1 + center, x), torch.empty((), dtype=torch.float32)
    _forward(x, mask, None, None, None, None, stat, count, groups, eps)
    return stat, count


def standardize(
    x: Tensor, mean: Tensor | None, scale: Tensor, shift: Tensor, mask: Tensor | None = None, *, sums: bool = False,
    groups: int = 0, eps: float = 0.0,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """`(x - mean) * scale + shift`; with `sums`, the quadratic means `[1, C]` of the real rows and their number."""
    y, fresh = torch.empty_like(x), (_vectors(1, x), torch.empty((), dtype=torch.float32)) if sums else None
    _forward(x, mask, y, mean, scale, shift, *(fresh or (None, None)), groups, eps)
    return y, fresh


def _forward(x, mask, y, mean, scale, shift, stat, count, groups, eps) -> None:
    n, channels = _sizes(x)
    center = stat is not None and len(stat) == 2
    _call(
        "column_forward", x=x, mask=mask, y=y, mean=mean, scale=scale, shift=shift, stat=stat, count=count, n=n,
        channels=channels, groups=groups, eps=eps, center=center,
    )  # fmt: skip


def gradient(
    dy: Tensor, x: Tensor, mean: Tensor | None, mask: Tensor | None = None, *,
    to_dx: tuple[Tensor, Tensor, Tensor] | None = None, sums: bool = True, real: bool = False, groups: int = 0,
    eps: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx and the sums over rows of dy and of `dy * (x - mean)`, `[2, C]`; `[4, C]` with those of real rows if `real`.

    Given `to_dx = (slant, slope, level)`, dx is `slant * dy + slope * (x - mean) + level`, in the padding `slant * dy`.
    """
    n, channels = _sizes(x)
    dx, out = None if to_dx is None else torch.empty_like(x), _vectors(4 if real else 2, x) if sums else None
    slant, slope, level = to_dx or (None, None, None)
    _call(
        "column_backward", dy=dy, x=x, mask=mask, dx=dx, mean=mean, slant=slant, slope=slope, level=level, sums=out,
        n=n, channels=channels, groups=groups, eps=eps, real=real,
    )  # fmt: skip
    return dx, out


def divide(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, length: bool = False) -> Tensor:
    """Each row divided by its root mean square (or `length`), times `weight`, plus `bias`: as `fused.divide`."""
    return Divide.apply(x, weight, bias, eps, length)  # type: ignore[return-value]


class Divide(torch.autograd.Function):
    """As `fused.Divide`, in one pass each way. Differentiated twice, it is the plain composition."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, length):
        x = x.contiguous()
        (n, channels), y = _sizes(x), torch.empty_like(x)
        given, level = _whole(weight, channels), _whole(bias, channels)
        if given is None and level is not None:
            given = torch.ones_like(level)
        _call("row_forward", x=x, y=y, weight=given, bias=level, n=n, channels=channels, eps=eps, length=length)
        ctx.save_for_backward(x, weight, bias)
        ctx.eps, ctx.length = eps, length
        return y

    @staticmethod
    def backward(ctx, dy):  # type: ignore[override]
        x, weight, bias = ctx.saved_tensors
        if torch.is_grad_enabled():
            dx, dweight = fused.differentiable(x, weight, ctx.eps, ctx.length, dy)
            return dx, dweight, None if bias is None else dy.sum(range(dy.dim() - 1)).to(bias.dtype), None, None
        (n, channels), dx = _sizes(x), torch.empty_like(x)
        sums = _vectors(2, x) if any(ctx.needs_input_grad[1:3]) else None
        _call(
            "row_backward", dy=dy.contiguous(), x=x, dx=dx, weight=_whole(weight, channels), sums=sums, n=n,
            channels=channels, eps=ctx.eps, length=ctx.length,
        )  # fmt: skip
        if sums is None:
            return dx, None, None, None, None
        dweight = None if weight is None else (sums[1].sum() if weight.numel() < channels else sums[1])
        dweight = None if weight is None or dweight is None else dweight.view(weight.shape).to(weight.dtype)
        return dx, dweight, None if bias is None else sums[0].to(bias.dtype), None, None


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _vectors(k: int, x: Tensor) -> Tensor:
    return torch.empty(k, x.shape[-1], dtype=torch.float32)


def _whole(parameter: Tensor | None, channels: int) -> Tensor | None:
    """A parameter as float32 `[C]`, side by side."""
    return None if parameter is None else parameter.detach().to(torch.float32).expand(channels).contiguous()


def _call(name: str, **given: Any) -> None:
    """A kernel, with its arguments in order: tensors by address, None as no address, the rest as C has it."""
    kernels, words = library(), []
    assert kernels is not None
    for listener in listeners:
        listener(name, given)
    for value in given.values():
        if isinstance(value, Tensor):
            assert value.is_contiguous()
            words.append(ctypes.c_void_p(value.data_ptr()))
        elif value is None:
            words.append(None)
        elif isinstance(value, float):
            words.append(ctypes.c_float(value))
        else:
            words.append(ctypes.c_int(value) if isinstance(value, bool) else ctypes.c_int64(value))
    kind = str(given["x"].dtype).removeprefix("torch.")
    getattr(kernels, f"{name}_{kind}")(*words, ctypes.c_int(torch.get_num_threads()))


def flops(name: str, given: dict[str, Any]) -> int:
    """Additions, multiplications, comparisons and roots of an element of x in a kernel with these arguments."""
    there = {key: value is not None for key, value in given.items()}
    if name == "row_forward":  # sum of squares, times the factor, weight and bias
        return 2 + 1 + there["weight"] + there["bias"]
    if name == "row_backward":  # sum of squares, sums of dy and dy z, g, its sum with z, dx
        return 2 + 4 * there["sums"] + there["weight"] + 2 + 3
    mean, groups = there["mean"], bool(given["groups"])
    if name == "column_forward":  # y, moments, layer-scale
        return there["y"] * (2 + mean) + there["stat"] * (4 if given["center"] else 2) + 3 * groups
    return there["sums"] * (3 + mean) + there["dx"] * (3 + 2 * mean + 5 * groups) + 3 * groups
