"""Run a model in float64, whatever types it asks for."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from normkit.models.fastpath import no_fast_path
from normkit.models.invoke import Call

NARROW = (torch.float32, torch.float16, torch.bfloat16)
NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)
HIDDEN_READS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)  # no operation that a trace sees


def import_compiler() -> None:
    """Import what PyTorch imports where a function mode is first called, in a thread of its own.

    A frame of that import stays alive, and with it the frames below it: ours would keep a model.
    """
    if "torch._dynamo" not in sys.modules:
        thread = threading.Thread(target=importlib.import_module, args=("torch._dynamo",))
        thread.start()
        thread.join()


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Compute everything in float64, without fused kernels that hide the operations."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with no_fast_path(), Double(), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(default)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Make the tensors of an analysis on the CPU, whatever the default device is."""
    there = torch.empty(0).device.type == "cpu"  # then without a mode, which costs time at each operation
    with contextlib.nullcontext() if there else torch.device("cpu"):
        yield


def widened(example: Call) -> Call:
    """Copy an example, with floating-point tensors in float64; a forward may change its input."""
    return example.copied(lambda t: t.clone().double() if t.dtype.is_floating_point else t.clone())


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` as one product per group, in any type.

    `x` is `[rows, in]` sorted by group, or `[groups, rows, in]` without `offs`, and `weight` is `[groups, in, out]`.
    `offs` is the row after the last one of each group. PyTorch ignores or refuses `bias` and `out_dtype` as well.

    Examples:
        >>> grouped_mm(torch.ones(3, 2), torch.ones(2, 2, 1), torch.tensor([1, 3])).flatten()
        tensor([2., 2., 2.])
    """
    if offs is None:
        return x @ weight
    ends = [0, *offs.tolist()]
    parts = [x[start:end] @ w for start, end, w in zip(ends, ends[1:], weight, strict=False) if start < end]
    return torch.cat([*parts, x.new_zeros(len(x) - ends[-1], weight.shape[2])])


def circular(input: Tensor, pad: Sequence[int], mode: str = "circular", value: float | None = None) -> Tensor:
    """Pad as `torch.nn.functional.pad`, by an index for each axis, which a trace follows."""
    for axis, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True), 1):
        length = input.shape[-axis]
        input = input.index_select(-axis, torch.arange(-before, length + after, device=input.device) % length)
    return input


GROUPED = ("_grouped_mm", "grouped_mm_fallback")  # of PyTorch, and of transformers where PyTorch has none


class Double(TorchFunctionMode):
    """Replace narrower types by float64, and operations without a kernel for float64."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call with float64 in place of narrower types."""
        kwargs = kwargs or {}
        if func in NARROWING:
            return args[0].double()
        if func in HIDDEN_READS:
            args[0].isfinite()  # one that it sees
        if getattr(func, "__name__", "") in GROUPED and args[0].dtype == torch.float64:
            return grouped_mm(*args, **kwargs)
        if func is F.pad and "circular" in (*args[2:3], kwargs.get("mode")):
            return circular(*args, **kwargs)
        return func(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
