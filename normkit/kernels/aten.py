"""PyTorch's own fused kernels of other norms, for tensors on a CPU where there are none in C++.

A chain of elementwise operations reads and writes every number several times. PyTorch's kernels of batch and layer
normalization take any vectors as statistics, and so compute moments, sums and gradients in one pass each.
"""

from typing import Any

import torch
from torch import Tensor

from normkit.kernels import reference
from normkit.kernels.reference import gradient  # as fast in plain operations
from normkit.kernels.sync import join

__all__ = ["gradient", "gradient_sums", "moments", "row_norm", "row_norm_grad", "standardize"]
HALVES = (torch.bfloat16, torch.float16)
BLOCK = 4096  # rows at a time: the kernels add up one row after another


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """As `reference.moments`."""
    wide = reference.wide_type(x) if dtype is None else dtype
    rows = _rows(x, wide, mask)
    stat, count = rows.new_zeros(2, x.shape[-1], dtype=wide), rows.new_zeros((), dtype=wide)
    ours: Any = torch.zeros_like(stat) if rows.dtype is not wide else (None, None)  # whose type is that of the results
    start = rows[:1] if rows.dtype is wide and len(rows) else None  # the kernel loses digits where means are large
    for block in rows.split(BLOCK) if len(rows) else ():
        block = block if start is None else block - start  # noqa: PLW2901
        found = torch.stack(torch.batch_norm_update_stats(block, ours[0], ours[1], 0.0))
        stat, count = join(stat, count, found, count.new_tensor(len(block)), center=True)
    stat = stat if start is None else torch.stack([stat[0] + start[0], stat[1]])
    return stat if center else torch.addcmul(stat[1], stat[0], stat[0])[None], count


def standardize(x: Tensor, stat: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """As `reference.standardize`."""
    wide = torch.promote_types(x.dtype, stat.dtype)
    mean = stat[0] if len(stat) == 2 else torch.zeros_like(stat[-1])
    weight, bias = torch.ones_like(mean) if weight is None else weight, torch.zeros_like(mean) if bias is None else bias
    w, b, m, v = (t.to(wide).expand(x.shape[-1]) for t in (weight, bias, mean, stat[-1]))
    y = torch.native_batch_norm(_rows(x, wide), w, b, m, v, False, 0.0, eps)[0].to(x.dtype)
    return torch.ops.aten._unsafe_view(y, x.shape)  # no view: a later layer may change y in place


def gradient_sums(
    dy: Tensor, x: Tensor, mean: Tensor | None, mask: Tensor | None = None, real: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """As `reference.gradient_sums`."""
    if not torch._C._has_storage(dy):  # vmap passes gradients without memory
        return reference.gradient_sums(dy, x, mean, mask, real, dtype)
    wide, kept = x.dtype if dtype is None else dtype, [None, mask] if real and mask is not None else [None]
    pairs = ([_rows(t, wide, each) for t in (dy.to(x.dtype), x)] for each in kept)
    return torch.cat([_sums(of_dy, of_x, mean, wide) for of_dy, of_x in pairs])


def _sums(dy: Tensor, x: Tensor, mean: Tensor | None, dtype: torch.dtype) -> Tensor:
    total = x.new_zeros(2, x.shape[-1], dtype=dtype)
    one, mean = torch.ones_like(total[0]), torch.zeros_like(total[0]) if mean is None else mean
    for block in zip(dy.split(BLOCK), x.split(BLOCK), strict=True) if len(x) else ():
        _, along, plain = torch.ops.aten.native_batch_norm_backward(
            *block, one, None, None, mean, one, True, 0.0, [False, True, True]
        )
        total += torch.stack([plain, along])
    return total


def _rows(x: Tensor, wide: torch.dtype, mask: Tensor | None = None) -> Tensor:
    """The real rows of `x`, of a type that the kernels take beside vectors of type `wide`."""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    rows = rows if mask is None else rows.index_select(0, mask.flatten().nonzero().squeeze(1))
    return rows if rows.dtype in HALVES and wide is torch.float32 else rows.to(wide)


def row_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, groups: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `reference.row_norm` for "rms" and "scale"; also return the factor of each row."""
    wide = reference.wide_type(x, weight, bias)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    square = length.square() / x.shape[-1]
    factor = length.clamp(min=eps).reciprocal() if kind == "scale" else torch.rsqrt(square + eps)
    y = x * factor
    y = y if weight is None else y.mul_(weight)
    return (y if bias is None else y.add_(bias)).to(x.dtype), factor


def row_norm_grad(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, factor: Tensor, kind: str, eps: float,
    groups: int, wanted: tuple[bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of x, weight and bias, by those of LayerNorm, which also removes the mean of `weight * dy`."""
    width, wide = x.shape[-1], factor.dtype
    rows, dys = (t.reshape(-1, width).to(wide).contiguous() for t in (x, dy))
    scaled, root = factor.reshape(-1, 1), width**0.5
    share = root if kind == "scale" else 1.0  # a length is a root mean square times the root of the width
    gain = torch.ones(width, dtype=wide) if weight is None else weight.to(wide).expand(width).contiguous()
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dys, rows, (width,), torch.zeros_like(scaled), scaled * share, gain / share, None if bias is None else gain,
        [True, weight is not None and wanted[0], bias is not None and wanted[1]],
    )  # fmt: skip
    dx.addcmul_(scaled, (dys.mv(gain) / width)[:, None])
    if kind == "scale":  # below `eps` the divisor is a constant
        dx = torch.where(scaled * eps < 1, dx, dys * gain * scaled)
    dweight = None if dweight is None or weight is None else (dweight / share).sum_to_size(weight.shape)
    dweight, dbias = (
        None if grad is None or p is None else grad.to(p.dtype) for grad, p in ((dweight, weight), (dbias, bias))
    )
    return dx.to(x.dtype).view(x.shape), dweight, dbias
