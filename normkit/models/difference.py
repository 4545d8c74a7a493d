"""Compare the outputs of two models."""

from typing import Any

import torch
from torch import Tensor

from normkit.models.invoke import tensors

OUTLIER = 1e4  # times the median of distinct numbers, from which on a number is compared by itself


@torch.no_grad()
def error(mine: Any, theirs: Any) -> float:
    """Compute the largest difference between two outputs, relative to each largest number.

    Numbers above 10,000 times the median, such as those that stand for minus infinity, are compared by themselves.

    `theirs` is the reference. The error is inf where shapes, types or infinite numbers differ.
    """
    mine, theirs = tensors(mine), tensors(theirs)
    if mine.keys() != theirs.keys() or not mine:
        return float("inf")
    return max(_difference(mine[path], theirs[path]) for path in mine)


def count_infinite(out: Any) -> int:
    """Count the numbers in an output that are NaN or infinite."""
    return sum(int((~t.isfinite()).sum()) for t in tensors(out).values())


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.is_complex() and b.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.dtype.is_floating_point:
        return 0.0 if torch.equal(a, b) else float("inf")
    finite = b.isfinite()
    if not torch.equal(a.isfinite(), finite) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a[finite].double(), b[finite].double()
    if not a.numel():
        return 0.0
    size = b.abs()
    usual = size[size <= OUTLIER * middle].max() if (middle := size.unique().median()) else size.max()
    return float(((a - b).abs() / size.clamp(min=float(usual.clamp(min=1e-30)))).max())
