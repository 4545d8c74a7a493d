"""The arithmetic of all norms in plain PyTorch.

Per-token operations compute in float32 or wider and return the type of `x`. Per-channel statistics have `k` rows:
`[2, C]` (mean, variance) with the mean removed, else `[1, C]` (quadratic mean).
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# -- per token --------------------------------------------------------------------------------------------------------


def layer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Center and scale each row, with the biased variance.

    >>> layer(torch.tensor([[1.0, 3.0]]), None, None, 0.0)
    tensor([[-1.,  1.]])
    """
    wide = wide_type(x, weight, bias)
    weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
    return F.layer_norm(x.to(wide), x.shape[-1:], weight, bias, eps).to(x.dtype)


def rms(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, inside: bool = True) -> Tensor:
    """Divide each row by its root mean square, with `eps` inside the root or added to it.

    >>> rms(torch.tensor([[3.0, 3.0]]), None, None, 0.0)
    tensor([[1., 1.]])
    """
    wide = x.to(wide_type(x, weight))
    if inside:
        y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    else:  # the gradient of a length is 0 at a row of zeros, that of a root is not finite
        y = wide / (torch.linalg.vector_norm(wide, dim=-1, keepdim=True) / x.shape[-1] ** 0.5 + eps)
    return affine(y, weight, bias).to(x.dtype)


def scale(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Divide each row by its length, at least `eps`.

    >>> scale(torch.tensor([[3.0, 4.0]]), None, None, 1e-5)
    tensor([[0.6000, 0.8000]])
    """
    wide = x.to(wide_type(x, weight))
    y = wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp(min=eps)
    return affine(y, weight, bias).to(x.dtype)


def group(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int) -> Tensor:
    """Normalize each of `groups` runs of consecutive channels of each row as `layer` does.

    >>> group(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), None, None, 0.0, 2)
    tensor([[-1.,  1., -1.,  1.]])
    """
    split = x.to(wide_type(x, weight)).unflatten(-1, (groups, -1))
    y = F.layer_norm(split, split.shape[-1:], None, None, eps).flatten(-2)
    return affine(y, weight, bias).to(x.dtype)


def group_sample(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int, mask: Tensor | None = None
) -> Tensor:
    """Normalize over a group's channels and all real positions of a sample.

    Wu & He 2018, Eq. 7. `x` is `[batch, ..., C]`; `mask` is `[batch, ...]`, True where a position is real.
    """
    split = x.to(wide_type(x, weight)).unflatten(-1, (groups, -1))  # [batch, ..., groups, C / groups]
    if split.numel() == 0:
        return affine(x, weight, bias).to(x.dtype)  # with gradients of zeros
    over = (*range(1, split.dim() - 2), split.dim() - 1)
    mean, var = moments_over(split, over, None if mask is None else mask[..., None, None])
    return affine(((split - mean) * torch.rsqrt(var + eps)).flatten(-2), weight, bias).to(x.dtype)


def moments_over(x: Tensor, axes: tuple[int, ...], keep: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and biased variance over axes where `keep` is True; 0 and 1 if nowhere."""
    if keep is None:
        var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
        return mean, var
    count = keep.expand_as(x).sum(axes, keepdim=True)
    mean = torch.where(keep, x, 0).sum(axes, keepdim=True) / count.clamp(min=1)
    squares = torch.where(keep, x - mean, 0).square().sum(axes, keepdim=True)
    return mean, torch.where(count > 0, squares, 1) / count.clamp(min=1)


def affine(y: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`y * weight + bias`, either of them optional."""
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def wide_type(x: Tensor, *parameters: Tensor | None) -> torch.dtype:
    """The type to compute in: float32, or wider for wider inputs."""
    types = (torch.float32, *(p.dtype for p in parameters if p is not None))
    return functools.reduce(torch.promote_types, types, x.dtype)


def differentiable_grad(op: Callable[..., Tensor], dy: Tensor, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of `op(*inputs)` that can be differentiated again."""
    needed = [t for t in inputs if t is not None and t.requires_grad]
    grads = iter(torch.autograd.grad(op(*inputs), needed, dy, create_graph=True))
    return tuple(next(grads) if t is not None and t.requires_grad else None for t in inputs)


# -- per channel ------------------------------------------------------------------------------------------------------


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the real rows of `x`, and the number of these rows.

    Args:
        x: `[..., C]`.
        mask: `[...]`, True where a row is real. Without a real row the statistics are zero.
        center: Mean and variance; else the quadratic mean.
        dtype: Type to compute in; None for that of `x`.

    >>> moments(torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([True, True, False]), center=True)
    (tensor([[2.],
            [1.]]), tensor(2.))
    """
    rows = x.reshape(-1, x.shape[-1]).to(x.dtype if dtype is None else dtype)
    if mask is None:
        count = rows.new_full((), rows.shape[0])
        if rows.shape[0] == 0:
            return rows.new_zeros(1 + center, rows.shape[1]), count
        if center:
            mean = rows.mean(0)  # two passes: torch.var_mean over rows costs 15 times as much on a CPU
            return torch.stack([mean, (rows - mean).square_().mean(0)]), count
        return rows.square().mean(0, keepdim=True), count
    keep = mask.reshape(-1, 1)
    real = keep.sum(dtype=rows.dtype)
    count = real.clamp(min=1)
    rows = torch.where(keep, rows, 0)
    if center:
        mean = rows.sum(0) / count
        var = torch.where(keep, rows - mean, 0).square().sum(0) / count
        return torch.stack([mean, var]), real
    return rows.square().sum(0, keepdim=True) / count, real


def standardize(
    x: Tensor, stat: Tensor, eps: float, center: bool, scale: Tensor | None = None, shift: Tensor | None = None
) -> Tensor:
    """Standardize with given statistics `[k, C]`.

    `y = scale * z + shift` with `z = (x - mean) / sqrt(var + eps)`.

    >>> standardize(torch.tensor([[3.0], [5.0]]), torch.ones(2, 1), 0.0, True).tolist()
    [[2.0], [4.0]]
    """
    inv = torch.rsqrt(stat[-1] + eps)
    scale = inv if scale is None else inv * scale.to(inv.dtype)
    shift = torch.zeros_like(inv) if shift is None else shift.to(inv.dtype)
    return multiply_add(x, scale, shift - stat[0] * scale if center else shift)


def standardize_grad(
    dy: Tensor, x: Tensor, stat: Tensor, eps: float, center: bool, factor: Tensor | None = None,
    mask: Tensor | None = None, removed: Tensor | None = None, sums: bool = True, real: bool = False,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Gradient of `standardize`: dx, and the sums over rows of dy and of dy * z.

    `dx = (factor * dy - removed[0] - z * removed[-1]) / sqrt(var + eps)`, the first of these only if `center`.

    Args:
        dy: Gradient of the output, `[..., C]`.
        x: Input of the forward pass.
        stat: Statistics of the forward pass, `[k, C]`.
        eps: Added to the variance.
        center: Whether `stat` has a mean.
        factor: Product of all that multiplies dy on its way to z, `[C]`.
        mask: `[...]`, True where a row is real. Nothing is removed from the gradient of the others.
        removed: Gradient statistics to remove, `[k, C]`; None for sums alone.
        sums: Compute the sums, `[2, C]`.
        real: With a mask, also the sums over real rows: `[4, C]`.

    Returns:
        dx (None without `removed`) and the sums (None without `sums`).
    """
    rows, dys = (t.reshape(-1, x.shape[-1]).to(stat.dtype) for t in (x, dy))
    inv, dy_coefficient, taken = gradient_vectors(stat, eps, factor, removed)
    mean = stat[0] if center else None  # z = (x - mean) * inv is never written out: both join [C] factors
    keep = None if mask is None else mask.reshape(-1, 1)
    dx = out = None
    if sums:
        out = _sums(dys, rows, mean, inv)
        if real and keep is not None:
            dy_real, x_real = torch.where(keep, dys, 0), torch.where(keep, rows, 0)
            out = torch.cat([out, _sums(dy_real, x_real, mean, inv)])
    if dy_coefficient is not None and taken is not None:
        slope = taken[-1] * inv
        dx = torch.addcmul(torch.zeros_like(slope) if mean is None else taken[0] - slope * mean, rows, slope)
        dx = dx if keep is None else torch.where(keep, dx, 0)
        dx = dx.addcmul_(dys, dy_coefficient).to(x.dtype).view(x.shape)
    return dx, out


def _sums(dy: Tensor, x: Tensor, mean: Tensor | None, inv: Tensor) -> Tensor:
    return torch.stack([dy.sum(0), (dy * (x if mean is None else x - mean)).sum(0) * inv])


def multiply_add(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """`x * scale + shift` with vectors `[C]` of a type to compute in; in the type of `x`.

    >>> multiply_add(torch.ones(2, 1), torch.tensor([3.0]), torch.tensor([0.5])).tolist()
    [[3.5], [3.5]]
    """
    if x.dtype == scale.dtype:  # no casts in an exported graph
        return torch.addcmul(shift, x, scale)
    wide = torch.promote_types(x.dtype, scale.dtype)
    return torch.addcmul(shift.to(wide), x.to(wide), scale.to(wide)).to(x.dtype)


# -- vectors [C] that all implementations need ------------------------------------------------------------------------


def product(dtype: torch.dtype, *factors: Tensor | None) -> Tensor | None:
    """Product of the factors that are given, in `dtype`; None without any."""
    given = [t.to(dtype) for t in factors if t is not None]
    return functools.reduce(torch.mul, given) if given else None


def gradient_vectors(
    stat: Tensor, eps: float, factor: Tensor | None, removed: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """1 / sqrt(var + eps), the coefficient of dy in dx, and `removed` with its sign and scale."""
    inv = torch.rsqrt(stat[-1] + eps)
    if removed is None:
        return inv, None, None
    return inv, inv if factor is None else inv * factor, removed * -inv
