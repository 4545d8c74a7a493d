"""Operations that norms use, each run by the implementation that `dispatch` selects.

`reference.py` defines what each computes. With `groups`, a per-channel operation first applies layer-scale to every
row; only the C++ kernels take it, in the same pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from normkit.kernels import dispatch, fused, layout, reference
from normkit.kernels.cpu import entry as cpu

# -- per token --------------------------------------------------------------------------------------------------------


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Center and scale each row, with the biased variance."""
    joined = all(p is None or dispatch.can_join(x, p.dtype) for p in (weight, bias))
    joined &= bias is None or bias.dtype is (x if weight is None else weight).dtype  # else PyTorch raises an error
    half = x.dtype in dispatch.HALVES  # PyTorch's kernel for a CPU adds up gradients of weight and bias in this type
    joined &= not (half and torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in (weight, bias)))
    native = half and reference.wide_type(x, weight, bias) is torch.float32
    kind = dispatch.select(x, "layer", native=native, fused=joined, small=dispatch.is_small(x, weight, bias))
    if kind == "fused":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    if kind == "native":
        return cpu.divide(x, weight, bias, eps, center=True)
    return _module(kind).layer(x, weight, bias, eps)


def rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, inside: bool = True) -> Tensor:
    """Divide each row by its root mean square, with `eps` inside the root or added to it."""
    native = inside and reference.wide_type(x, weight, bias) is torch.float32
    small = inside and bias is None and dispatch.is_small(x, weight)
    kind = dispatch.select(x, "rms", native=native, fused=inside and _needs_grad(x, weight), small=small)
    if kind == "fused" and small:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    if kind in ("native", "fused"):
        return _module(kind).divide(x, weight, bias, eps)
    return _module(kind).rms(x, weight, bias, eps, inside=inside)


def scale(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Divide each row by its length, at least `eps`."""
    analytic = (weight is None or weight.numel() == 1) and _needs_grad(x, weight)
    kind = dispatch.select(x, "scale", native=reference.wide_type(x, weight, bias) is torch.float32, fused=analytic)
    if kind in ("native", "fused"):
        return _module(kind).divide(x, weight, bias, eps, length=True)
    return _module(kind).scale(x, weight, bias, eps)


def group(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int) -> Tensor:
    """Normalize each of `groups` runs of consecutive channels of each row as `layer` does."""
    kind = dispatch.select(x, "group", native=False, fused=False)
    return _module(kind).group(x, weight, bias, eps, groups)


def group_rms(x: Tensor, eps: float, groups: int, *, inside: bool = True) -> Tensor:
    """Divide each of `groups` runs of channels by its root mean square: layer-scale.

    Shen et al. 2020, section 4.2; `GroupScaling1D` in their code. No parameters.
    """
    return rms(x.unflatten(-1, (groups, -1)), None, None, eps, inside=inside).flatten(-2)


def _module(kind: str) -> Any:
    """The module that implements operations in this way."""
    return dispatch.load_triton() if kind == "triton" else {"native": cpu, "fused": fused, "reference": reference}[kind]


def _needs_grad(x: Tensor, weight: Tensor | None) -> bool:
    """True if a backward pass is needed; without one, plain operations are as fast."""
    wanted = x.requires_grad or (weight is not None and weight.requires_grad)
    return wanted and torch.is_grad_enabled() and forward_ad._current_level < 0


# -- per channel ------------------------------------------------------------------------------------------------------


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, dtype: torch.dtype | None = None, groups: int = 0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Statistics `[k, C]` of the real rows of `x` and their number: `reference.moments`."""
    dtype = x.dtype if dtype is None else dtype
    kind = dispatch.select(x, "moments", dtype)
    if kind == "triton":
        return dispatch.load_triton().moments(x, mask, center)
    if kind == "native":
        return cpu.moments(x, mask, center, groups, eps)
    return (fused if kind == "fused" else reference).moments(x, mask, center, dtype)


def standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, scale: Tensor | None = None, shift: Tensor | None = None,
    groups: int = 0,
) -> Tensor:  # fmt: skip
    """Standardize with given statistics: see `reference.standardize`."""
    kind = dispatch.select(x, "standardize", stat.dtype)
    if kind == "native":
        return cpu.standardize(x, stat, eps, center, scale, shift, groups)
    return _module(kind).standardize(x, stat, eps, center, scale, shift)


def select_grad(dy: Tensor, x: Tensor, wide: torch.dtype, groups: int = 0) -> str:
    """Select the implementation of `standardize_grad` and count it.

    With layer-scale it is that of the forward pass.
    """
    kind = dispatch.select(x, "standardize_grad", wide)
    if groups:
        return "native"
    if kind in ("native", "fused") and not dispatch.can_use_torch_kernels(dy):
        return "reference"
    return "fused" if kind == "native" and dy.dtype is not x.dtype else kind


def standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None = None,
    mask: Tensor | None = None, removed: Tensor | None = None, sums: bool = True, real: bool = False, groups: int = 0,
    kind: str = "",
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradient of `standardize`: `reference.standardize_grad`; `kind` is from `select_grad`."""
    kind = kind or select_grad(dy, x, stat.dtype, groups)
    given = dy, x, stat, eps, center, factor, mask, removed, sums, real
    if kind == "native":
        return cpu.standardize_grad(*given, groups=groups)
    return _module(kind).standardize_grad(*given)


def multiply_add(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift` with vectors `[C]` of a type to compute in; in the type of `x`."""
    if not torch.is_grad_enabled() and dispatch.can_join(x, scale.dtype) and layout.has_rows(x):
        shift = shift.to(scale.dtype)
        if scale.dtype is torch.float32 and dispatch.can_use_native(x):
            return cpu.multiply_add(x, scale.contiguous(), shift.contiguous())
        return fused.multiply_add(x, scale, shift)
    return reference.multiply_add(x, scale, shift)


# -- whole passes of a norm with batch statistics ---------------------------------------------------------------------


def infer(norm: Any, x: Tensor) -> Tensor | None:
    """Apply a norm by its running statistics; None without a kernel or with gradients."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or dispatch.is_traced() or not layout.has_rows(x):
        return None
    kernels = dispatch.custom_kernels(x, norm.running.dtype)
    if kernels is None:
        return None
    dispatch.select(x, "infer", norm.running.dtype)
    given = norm.running, norm.eps, norm.center, norm.weight, norm.bias
    return cpu.standardize(x, *given, norm.groups) if kernels is cpu else kernels.standardize(norm.rest(x), *given)
