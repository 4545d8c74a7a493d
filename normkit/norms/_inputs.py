"""Inputs of norms that are no plain tensors: jagged batches and DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from normkit.norms._base import Norm


def find_form(x: Any) -> Callable[[Norm, Any, Tensor | None], Tensor] | None:
    """Return the function that normalizes inputs of this form, None for plain tensors."""
    if isinstance(x, Tensor) and x.is_nested and x.layout is torch.jagged:
        return normalize_jagged
    return normalize_sharded if is_dtensor(x) else None


def is_dtensor(x: object) -> bool:
    """Return True for a DTensor, without importing its package for plain tensors."""
    if type(x) in (Tensor, torch.nn.Parameter) or not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


# -- jagged batches: all rows of `values` are real tokens, except those that `lengths` leaves out ---------------------


def normalize_jagged(norm: Norm, x: Tensor, mask: Tensor | None) -> Tensor:
    """Normalize the values of a nested tensor; the output has its offsets."""
    name, offsets, lengths, axis = type(norm).__name__, x.offsets(), x.lengths(), x._ragged_idx  # type: ignore[attr-defined]
    if mask is not None and not mask.is_nested:
        raise ValueError(f"{name} got a dense mask and a jagged x, which has no padding; pass x without a mask")
    if x.shape[-1] != norm.dim:
        raise ValueError(f"{name}(dim={norm.dim}) takes x[batch, jagged, {norm.dim}]; got shape {tuple(x.shape)}")
    values = x.values()
    mask = None if mask is None else mask.values()
    if lengths is not None:
        real = _rows_in_use(offsets, lengths, values.shape[axis - 1])
        real = real.view(-1, *[1] * (values.dim() - axis - 1)).expand(values.shape[:-1])
        mask = real if mask is None else real & mask
    if norm.whole == "token":
        y = norm.normalize_plain(values, norm.check(values, mask))
    elif axis != 1 or lengths is not None:
        raise ValueError(f"{norm.spec} takes jagged x[batch, jagged, ...] without holes; call x.contiguous() first")
    else:
        y = _normalize_padded(norm, values, offsets, mask)
    extremes = x._maybe_min_seqlen, x._maybe_max_seqlen  # type: ignore[attr-defined]
    return torch.nested.nested_tensor_from_jagged(y, offsets, lengths, axis, *extremes)


def _rows_in_use(offsets: Tensor, lengths: Tensor, rows: int) -> Tensor:
    """Return `[rows]`, True for those that belong to a sample."""
    row = torch.arange(rows, device=offsets.device)
    sample = torch.searchsorted(offsets[: len(lengths)].contiguous(), row, right=True) - 1
    starts, ends = offsets[sample.clamp(min=0)], (offsets[: len(lengths)] + lengths)[sample.clamp(min=0)]
    return (row >= starts) & (row < ends)


def _normalize_padded(norm: Norm, values: Tensor, offsets: Tensor, mask: Tensor | None) -> Tensor:
    """Normalize `values [rows, ...]` by samples: as a padded batch."""
    lengths = offsets.diff()
    places = torch.arange(int(lengths.max()), device=offsets.device) < lengths[:, None]  # [batch, length]
    x = values.new_zeros(*places.shape, *values.shape[1:]).index_put((places,), values)
    keep = places.view(*places.shape, *[1] * (values.dim() - 2)).expand(x.shape[:-1])
    if mask is not None:
        keep = keep.index_put((places,), mask)
    return norm.normalize(x, norm.check(x, keep))[places]


# -- DTensors: each process normalizes its rows, and statistics are those of all ---------------------------------------


def normalize_sharded(norm: Norm, x: DTensor, mask: Tensor | None) -> Tensor:
    """Normalize the local rows of a DTensor, by statistics over all processes that have others.

    Where a norm cannot compute on shards, as of channels, they are gathered.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mask, mesh = norm.check(x, mask), x.device_mesh
    axes = range(x.dim() - 1) if norm.whole == "token" else range(1)
    placements = [p if isinstance(p, Shard) and p.dim % x.dim() in axes else Replicate() for p in x.placements]
    shards = [axis for axis, p in enumerate(placements) if isinstance(p, Shard)]
    if mask is not None:
        mask = mask if is_dtensor(mask) else DTensor.from_local(mask, mesh, [Replicate()] * mesh.ndim, run_check=False)
        mask = mask.redistribute(placements=placements).to_local()  # pyright: ignore[reportAttributeAccessIssue]
    twin: Any = object.__new__(type(norm))  # the same norm with local tensors; its state shares their memory
    vars(twin).update(vars(norm), processes=tuple(mesh.get_group(axis) for axis in shards), _state=None)
    grads = [Partial() if isinstance(p, Shard) else p for p in placements]
    twin._parameters = {name: _local_parameter(norm, name, p, grads) for name, p in norm._parameters.items()}
    twin._buffers = {name: _local_buffer(b) for name, b in norm._buffers.items()}
    local = x.redistribute(placements=placements).to_local(grad_placements=placements)
    y = twin.normalize_plain(local, mask)
    y = DTensor.from_local(y, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())
    return y.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])


def _local_parameter(norm: Norm, name: str, parameter: Any, grads: list[Any]) -> Tensor | None:
    """Return the whole parameter; its gradient is a sum over processes that have shards."""
    from torch.distributed.tensor import Replicate

    if parameter is None:
        return None
    if not is_dtensor(parameter):
        raise TypeError(
            f"{type(norm).__name__}.{name} is a plain tensor and x a DTensor; its gradient would not be summed over "
            "processes. Distribute the norm: parallelize_module(norm, mesh, SequenceParallel())"
        )
    return parameter.redistribute(placements=[Replicate()] * len(grads)).to_local(grad_placements=grads)


@torch.no_grad()
def _local_buffer(buffer: Any) -> Tensor | None:
    if not is_dtensor(buffer):
        return buffer
    if not all(p.is_replicate() for p in buffer.placements):
        raise TypeError(f"a buffer of a norm is placed as {buffer.placements}; replicate it")
    return buffer.to_local()  # the same object each time without gradients
