"""Run a model in float64, whatever types it asks for."""

import contextlib
import importlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
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


class Double(TorchFunctionMode):
    """Replace narrower types by float64."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call with float64 in place of narrower types."""
        kwargs = kwargs or {}
        if func in NARROWING:
            return args[0].double()
        if func in HIDDEN_READS:
            args[0].isfinite()  # one that it sees
        return func(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})


def _wide(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in NARROW else value
