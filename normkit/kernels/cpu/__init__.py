"""Kernels in C++ for eager arithmetic on a CPU: each pass over the activations reads and writes them once.

`kernels.cpp` is compiled on first use where there is a compiler (`build.py`); without one PyTorch's own kernels are put
to other uses (`ops/fused.py`). Tensors are float32 or bfloat16, vectors `[C]` float32.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.kernels import fused
from normkit.kernels.cpu.build import library, obstacle
from normkit.kernels.kernel_rule import Decided, KernelRule, moved
from normkit.kernels.step_statistics import StepStatistics

__all__ = [
    "DTYPES", "LAYER_SCALE", "call", "differentiate", "divide", "flops", "gradient", "infer", "library", "listeners",
    "moments", "obstacle", "read_again", "standardize", "train",
]  # fmt: skip

LAYER_SCALE = True  # kernels of columns take `groups`
DTYPES = (torch.float32, torch.bfloat16)
ALLOWED = {*DTYPES, torch.int64, torch.bool}
FORWARD = ("batch", "stale", "geometric", "arithmetic", "renorm")  # as rules.h numbers them
BACKWARD = ("exact", "stale", "windowed")
_functions: dict[str, Any] = {}
listeners: list[Callable[[str, dict], object]] = []  # told the name and the arguments of every kernel that is called


def moments(x: Tensor, mask: Tensor | None, center: bool, groups: int = 0, eps: float = 0.0) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the real rows of `x`, after layer-scale where there are groups, and their number."""
    stat, count = _room(x, 1 + center), x.new_empty((), dtype=torch.float32)
    _forward(_plain(x), mask, None, None, None, None, stat, count, groups, eps)
    return stat, count


def standardize(
    x: Tensor, mean: Tensor | None, scale: Tensor, shift: Tensor, mask: Tensor | None = None, *, sums: bool = False,
    groups: int = 0, eps: float = 0.0,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """`(x - mean) * scale + shift`; with `sums`, the quadratic means `[1, C]` of the real rows and their number."""
    x = _plain(x)
    y, fresh = torch.empty_like(x), (_room(x, 1), x.new_empty((), dtype=torch.float32)) if sums else None
    _forward(x, mask, y, mean, scale, shift, *(fresh or (None, None)), groups, eps)
    return y, fresh


def _forward(x, mask, y, mean, scale, shift, stat, count, groups, eps) -> None:
    n, channels = _sizes(x)
    center = stat is not None and len(stat) == 2
    call(
        "column_forward", x=x, mask=_flat(mask, n), y=y, mean=mean, scale=scale, shift=shift, stat=stat, count=count,
        n=n, channels=channels, groups=groups, eps=float(eps), center=center,
    )  # fmt: skip


def gradient(
    dy: Tensor, x: Tensor, mean: Tensor | None, mask: Tensor | None = None, *,
    to_dx: tuple[Tensor, Tensor, Tensor] | None = None, sums: bool = True, real: bool = False, groups: int = 0,
    eps: float = 0.0,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """dx and the sums over rows of dy and of `dy * (x - mean)`, `[2, C]`; `[4, C]` with those of real rows if `real`.

    Given `to_dx = (slant, slope, level)`, dx is `slant * dy + slope * (x - mean) + level`, in the padding `slant * dy`.
    """
    (n, channels), dy, x = _sizes(x), _plain(dy), _plain(x)
    dx, out = None if to_dx is None else torch.empty_like(x), _room(x, 4 if real else 2) if sums else None
    dy_coefficient, slope, level = to_dx or (None, None, None)
    call(
        "column_backward", dy=dy, x=x, mask=_flat(mask, n), dx=dx, mean=mean, dy_coefficient=dy_coefficient, slope=slope, level=level,
        sums=out, n=n, channels=channels, groups=groups, eps=float(eps), real=real,
    )  # fmt: skip
    return dx, out


def divide(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, length: bool = False) -> Tensor:
    """Each row divided by its root mean square (or `length`), times `weight`, plus `bias`: as `fused.divide`."""
    return Divide.apply(x, weight, bias, eps, length)  # type: ignore[return-value]


class Divide(torch.autograd.Function):
    """As `fused.Divide`, in one pass each way. Differentiated twice, it is the plain composition."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps, length):
        x = _plain(x)
        (n, channels), y = _sizes(x), torch.empty_like(x)
        given, level = _whole(weight, channels), _whole(bias, channels)
        if given is None and level is not None:
            given = torch.ones_like(level)
        call("row_forward", x=x, y=y, weight=given, bias=level, n=n, channels=channels, eps=float(eps), length=length)
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
        sums = _room(x, 2) if any(ctx.needs_input_grad[1:3]) else None
        call(
            "row_backward", dy=_plain(dy), x=x, dx=dx, weight=_whole(weight, channels), sums=sums, n=n,
            channels=channels, eps=float(ctx.eps), length=ctx.length,
        )  # fmt: skip
        if sums is None:
            return dx, None, None, None, None
        dweight = None if weight is None else (sums[1].sum() if weight.numel() < channels else sums[1])
        dweight = None if weight is None or dweight is None else dweight.view(weight.shape).to(weight.dtype)
        return dx, dweight, None if bias is None else sums[0].to(bias.dtype), None, None


def infer(rule: Any, x: Tensor) -> Tensor:
    """A norm by batch statistics at inference, layer-scale included."""
    (n, channels), x = _sizes(x), _plain(x)
    y, weight, bias = torch.empty_like(x), _whole(rule.weight, channels), _whole(rule.bias, channels)
    call(
        "infer", x=x, y=y, running=rule.running, weight=weight, bias=bias, n=n, channels=channels, groups=rule.groups,
        eps=float(rule.eps), center=rule.center,
    )  # fmt: skip
    return y


def train(
    rule: Any, kernel_rule: KernelRule, x: Tensor, mask: Tensor | None, known_in_advance: Tensor | None, groups: int
) -> Decided:
    """What `StatNorm` decides in a training forward, with its state moved: y; the batch's statistics, those to
    standardize with, the count, the step, `post` and `shift`; the memo.
    """
    (n, channels), k = _sizes(x), 1 + rule.center
    x, mask, one_pass = _plain(x), _flat(mask, n), kernel_rule.forward == "stale"
    y, weight, bias = torch.empty_like(x), _whole(rule.weight, channels), _whole(rule.bias, channels)
    batch, value, step = _room(x, k), _room(x, k), torch.empty_like(rule.step)
    count = x.new_empty((), dtype=torch.float32)
    output_scale = _room(x) if kernel_rule.forward in ("arithmetic", "renorm") else None
    shift = _room(x) if kernel_rule.forward == "renorm" else None
    saved = (_room(x, 1), _room(x, 1)) if one_pass else ()
    removed, gamma = saved or (None, None)
    call(
        "train", x=x, mask=mask, y=y, weight=weight, bias=bias, n=n, channels=channels, groups=groups,
        eps=float(rule.eps), center=rule.center, rule=FORWARD.index(kernel_rule.forward), known_in_advance=known_in_advance is not None,
        rate=float(kernel_rule.rate), warmup=kernel_rule.warmup, until_r=kernel_rule.until[0], until_d=kernel_rule.until[1],
        bound_r=float(kernel_rule.bounds[0]), bound_d=float(kernel_rule.bounds[1]), floor=float(kernel_rule.floor),
        unbiased=kernel_rule.unbiased, running=rule.running, step=rule.step, skipped=rule.skipped, window=kernel_rule.window,
        size=0 if kernel_rule.window is None else len(kernel_rule.window), smooth=kernel_rule.smooth_grad if one_pass else None,
        batch=batch, value=value, count=count, next=step, output_scale=output_scale, shift=shift, removed=removed, gamma=gamma,
    )  # fmt: skip
    moved(rule.running, rule.step, rule.skipped, kernel_rule.window)
    return y, StepStatistics(batch, value, count, step, output_scale, shift, saved=saved)


def differentiate(
    rule: Any, kernel_rule: KernelRule, dy: Tensor, x: Tensor, weight: Tensor | None, mask: Tensor | None,
    statistics: StepStatistics, known_in_advance: Tensor | None, has_bias: bool, groups: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias; the rule's state is moved."""
    (n, channels), dy, x = _sizes(x), _plain(dy), _plain(x)
    dx, dweight, dbias = torch.empty_like(x), _room(x), _room(x)
    removed, gamma = statistics.saved or (None, None)
    call(
        "differentiate", dy=dy, x=x, mask=_flat(mask, n), dx=dx, weight=_whole(weight, channels),
        n=n, channels=channels, groups=groups, eps=float(rule.eps), center=rule.center,
        real=mask is not None and rule.pad_grad == "real", rule=BACKWARD.index(kernel_rule.backward),
        known_in_advance=known_in_advance is not None, rate=float(kernel_rule.rate_grad), warmup=kernel_rule.warmup,
        exact_early=kernel_rule.exact_early, clamp=kernel_rule.clamp, value=statistics.value.contiguous(), count=statistics.count, at=statistics.step, output_scale=statistics.output_scale,
        shift=statistics.output_shift, removed=removed, gamma=gamma, skipped=rule.skipped_grad, window=kernel_rule.window_grad,
        size=0 if kernel_rule.window_grad is None else len(kernel_rule.window_grad), smooth=kernel_rule.smooth_grad, dweight=dweight,
        dbias=dbias,
    )  # fmt: skip
    moved(rule.skipped_grad, kernel_rule.window_grad, kernel_rule.smooth_grad)
    kind = x.dtype if weight is None else weight.dtype
    return dx, None if weight is None else dweight.to(kind), dbias.to(kind) if has_bias else None


def _plain(x: Tensor) -> Tensor:
    """The tensor with its numbers side by side, as they are."""
    return x.resolve_neg().contiguous()


def _flat(mask: Tensor | None, n: int) -> Tensor | None:
    if mask is not None and mask.numel() != n:
        raise ValueError(f"mask must say of each of {n} rows whether it is real; got {tuple(mask.shape)}")
    return None if mask is None else mask.reshape(-1).to(torch.bool).contiguous()


def _sizes(x: Tensor) -> tuple[int, int]:
    return x.numel() // x.shape[-1], x.shape[-1]


def _room(x: Tensor, *rows: int) -> Tensor:
    """Vectors `[*rows, C]` to be written."""
    return x.new_empty((*rows, x.shape[-1]), dtype=torch.float32)


def _whole(parameter: Tensor | None, channels: int) -> Tensor | None:
    """A parameter as float32 `[C]`, side by side."""
    if parameter is None or (parameter.dtype is torch.float32 and parameter.shape == (channels,)):
        return parameter if parameter is None else parameter.contiguous()
    return parameter.detach().to(torch.float32).expand(channels).contiguous()


def call(name: str, **given: Any) -> None:
    """A kernel, with its arguments in order: tensors by address, None as no address, the rest as C has it."""
    for listener in listeners:
        listener(name, given)
    kernel = f"{name}_{str(given['x'].dtype).removeprefix('torch.')}"
    function = _functions.get(kernel) or _function(kernel, given)
    words = []
    for key, value in given.items():
        if isinstance(value, Tensor):
            if not (value.is_cpu and value.dtype in ALLOWED and value.is_contiguous()):  # C would read past it
                raise RuntimeError(f"{name} of {given['x'].dtype} on a CPU: {key} is {value.dtype} on {value.device}")
            words.append(value.data_ptr())
        else:
            words.append(value)
    function(*words, torch.get_num_threads())


def _function(kernel: str, given: dict[str, Any]) -> Any:
    kernels, kinds = library(), {bool: ctypes.c_int, int: ctypes.c_int64, float: ctypes.c_float}
    assert kernels is not None
    types = [kinds.get(type(value), ctypes.c_void_p) for value in given.values()]
    address = ctypes.cast(ctypes.c_void_p.in_dll(kernels, kernel), ctypes.c_void_p).value
    assert address is not None
    _functions[kernel] = made = ctypes.CFUNCTYPE(None, *types, ctypes.c_int)(address)  # type: ignore[call-overload]
    return made


def read_again(name: str, given: dict[str, Any]) -> list[Tensor]:
    """What a call reads a second time, having been through all rows: statistics come first where none are foretold."""
    if name not in ("train", "differentiate") or given["known_in_advance"]:
        return []
    return [given["x"]] if name == "train" else [given["x"], given["dy"]]


def flops(name: str, given: dict[str, Any]) -> int:
    """Additions, multiplications, comparisons and roots of an element of x in a kernel with these arguments."""
    there = {key: value is not None for key, value in given.items()}
    if name == "row_forward":  # sum of squares, times the factor, weight and bias
        return 2 + 1 + there["weight"] + there["bias"]
    if name == "row_backward":  # sum of squares, sums of dy and dy z, g, its sum with z, dx
        return 2 + 4 * there["sums"] + there["weight"] + 2 + 3
    groups = bool(given["groups"])
    if name == "infer":
        return 2 + bool(given["center"]) + 3 * groups
    if name == "train":
        return 2 + 3 * bool(given["center"]) + 2 + 3 * groups
    if name == "differentiate":
        return 3 + 3 + 3 * bool(given["center"]) + 8 * groups
    mean = there["mean"]
    if name == "column_forward":  # y, moments, layer-scale
        return there["y"] * (2 + mean) + there["stat"] * (4 if given["center"] else 2) + 3 * groups
    return there["sums"] * (3 + mean) + there["dx"] * (3 + 2 * mean + 5 * groups) + 3 * groups
