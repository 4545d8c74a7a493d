"""Per-token arithmetic: every row of `x[..., C]` by itself, computed in float32 or wider, returned in `x.dtype`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.kernels import dispatch, fused


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Centre and scale each row: `weight * (x - mean) / sqrt(var + eps) + bias`, with the biased variance.

    >>> layer(torch.tensor([[1.0, 3.0]]), None, None, 0.0)
    tensor([[-1.,  1.]])
    """
    if dispatch.triton(x, "layer", native=False):
        return dispatch.load().layer(x, weight, bias, eps)
    if all(p is None or fused.joins(x, p.dtype) for p in (weight, bias)):  # computes in float32 by itself
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    wide = _wide(x, weight)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, inside: bool = True) -> Tensor:
    """Divide each row by its root mean square, `eps` inside the root (or added to it: `inside=False`).

    >>> rms(torch.tensor([[3.0, 3.0]]), None, None, 0.0)
    tensor([[1., 1.]])
    """
    if dispatch.triton(x, "rms", fused=inside, native=inside and _narrow(weight, bias)):
        return dispatch.load().rms(x, weight, bias, eps, inside=inside)
    if inside and _narrow(weight, bias) and (native := dispatch.native_kernels(x)):
        return native.divide(x, weight, bias, eps)
    if inside and fused.worth(x, weight):
        return _divide(x, weight, bias, eps)
    wide = x.to(_wide(x, weight))
    square = wide.square().mean(-1, keepdim=True)
    y = wide * torch.rsqrt(square + eps) if inside else wide / (square.sqrt() + eps)
    return affine(y, weight, bias).to(x.dtype)


def scale(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Divide each row by its length, at least `eps`: `weight * x / max(||x||, eps) + bias`.

    >>> scale(torch.tensor([[3.0, 4.0]]), None, None, 1e-5)
    tensor([[0.6000, 0.8000]])
    """
    if dispatch.triton(x, "scale", native=_narrow(weight, bias)):
        return dispatch.load().scale(x, weight, bias, eps)
    if _narrow(weight, bias) and (native := dispatch.native_kernels(x)):
        return native.divide(x, weight, bias, eps, length=True)
    if (weight is None or weight.numel() == 1) and fused.worth(x, weight):
        return _divide(x, weight, bias, eps, length=True)
    wide = x.to(_wide(x, weight))
    y = wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=eps)
    return affine(y, weight, bias).to(x.dtype)


def group(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int) -> Tensor:
    """Layer normalization of each of `groups` runs of consecutive channels of each row.

    >>> group(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), None, None, 0.0, 2)
    tensor([[-1.,  1., -1.,  1.]])
    """
    if dispatch.triton(x, "group", native=False):
        return dispatch.load().group(x, weight, bias, eps, groups)
    split = x.to(_wide(x, weight)).unflatten(-1, (groups, -1))
    y = F.layer_norm(split, split.shape[-1:], None, None, eps).flatten(-2)
    return affine(y, weight, bias).to(x.dtype)


def group_sample(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int, mask: Tensor | None = None
) -> Tensor:
    """The image form of group normalization: statistics over a group's channels and all real positions of a sample.

    `x` is `[batch, ..., C]`; `mask` is `[batch, ...]`, True where a position is real (Wu & He 2018, Eq. 7).
    """
    split = x.to(_wide(x, weight)).unflatten(-1, (groups, -1))  # [batch, ..., groups, C / groups]
    if split.numel() == 0:
        return x
    over = (*range(1, split.dim() - 2), split.dim() - 1)
    if mask is None:
        var, mean = torch.var_mean(split, over, correction=0, keepdim=True)
    else:
        keep = mask[..., None, None]
        count = keep.sum(over, keepdim=True).clamp(min=1) * split.shape[-1]
        mean = torch.where(keep, split, 0).sum(over, keepdim=True) / count
        var = torch.where(keep, split - mean, 0).square().sum(over, keepdim=True) / count
    return affine(((split - mean) * torch.rsqrt(var + eps)).flatten(-2), weight, bias).to(x.dtype)


def group_rms(x: Tensor, eps: float, groups: int) -> Tensor:
    """PowerNorm's layer-scale: each of `groups` runs of channels of a row divided by `sqrt(mean(x^2) + eps)`.

    Shen et al. 2020, section 4.2; `GroupScaling1D` in their code. No parameters.
    """
    if dispatch.triton(x, "group_rms"):
        return dispatch.load().group_rms(x, eps, groups)
    if native := dispatch.native_kernels(x):
        return native.divide(x.unflatten(-1, (groups, -1)), None, None, eps).flatten(-2)
    if fused.worth(x, None):
        return _divide(x.unflatten(-1, (groups, -1)), None, None, eps).flatten(-2)
    split = x.to(_wide(x, None)).unflatten(-1, (groups, -1))
    return (split * torch.rsqrt(split.square().mean(-1, keepdim=True) + eps)).flatten(-2).to(x.dtype)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`y * weight + bias`, either of them optional."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _divide(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, length: bool = False) -> Tensor:
    """`fused.divide`, rounded once: what it returns must be wide where something is done to it yet."""
    wide = _wide(x, weight)
    done = bias is None and wide is torch.promote_types(x.dtype, torch.float32)
    return affine(fused.divide(x if done else x.to(wide), weight, eps, length=length), None, bias).to(x.dtype)


def _narrow(*parameters: Tensor | None) -> bool:
    """Whether parameters need no more than float32, which is what our kernels for CPUs compute in."""
    return all(p is None or p.dtype is not torch.float64 for p in parameters)


def _wide(x: Tensor, weight: Tensor | None) -> torch.dtype:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return dtype if weight is None else torch.promote_types(dtype, weight.dtype)
