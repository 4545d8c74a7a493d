"""Which implementation of the ops runs, and what ran: Triton kernels, C++ ones, PyTorch's own, or plain PyTorch."""

import collections
import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

CHOICES = ("auto", "triton", "native", "fused", "reference")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_choice = os.environ.get("NORMKIT_KERNELS") or "auto"
if _choice not in CHOICES:
    raise ValueError(f"NORMKIT_KERNELS must be one of {', '.join(CHOICES)}; it is {_choice!r}")
ran: collections.Counter[str] = collections.Counter()  # "triton layer", "fused layer", ...: calls so far


@contextlib.contextmanager
def kernels(choice: str) -> Iterator[collections.Counter[str]]:
    """Choose what ops run on within the block, in all threads; yields a counter of what ran in it.

    - "auto": in eager mode the first of the next three that can; the reference elsewhere and under `torch.compile`.
    - "triton": Triton kernels for float32, bfloat16 and float16 tensors on CUDA, where triton can be imported. Asked
      for by name they run under `torch.compile` too, or there is a RuntimeError that says what is missing. CPU
      tensors work only under Triton's interpreter (`TRITON_INTERPRET=1` before Python starts).
    - "native": our C++ kernels for float32 and bfloat16 tensors on a CPU, compiled on first use where Linux has a C++
      compiler. Asked for by name, they run or there is a RuntimeError.
    - "fused": PyTorch's own fused kernels on a CPU.
    - "reference": plain PyTorch everywhere. Norms of each token can be differentiated twice; norms by batch statistics
      cannot while they train, by whatever kernels: that is a RuntimeError.

    `NORMKIT_KERNELS` in the environment is the choice outside of such blocks.

    >>> with kernels("reference") as ran_here:
    ...     _ = triton(torch.ones(2, 4), "layer")
    >>> dict(ran_here)
    {'reference layer': 1}
    """
    global _choice  # noqa: PLW0603
    if choice not in CHOICES:
        raise ValueError(f"kernels must be one of {', '.join(CHOICES)}; got {choice!r}")
    if choice == "triton" and _importable():
        load()  # a graph cannot
    if choice == "native" and (why := load_native().obstacle()):
        raise RuntimeError(f'kernels("native") cannot run: {why}; use kernels("auto")')
    before, counted = _choice, ran.copy()
    here: collections.Counter[str] = collections.Counter()
    _choice = choice
    try:
        yield here
    finally:
        _choice = before
        here.update(ran - counted)


def triton(x: Tensor, name: str, *, fused: bool = True, native: bool = True) -> bool:
    """Whether the op `name` of `x` runs as a Triton kernel now; remembers what runs in `ran`.

    `fused`, `native`: whether it has a path through PyTorch's fused kernels on a CPU, and through ours.
    """
    if torch.compiler.is_compiling():
        return _choice == "triton" and x.dtype in DTYPES
    if runs(x, name):
        kind = "triton"
    elif native and native_kernels(x):
        kind = "native"
    else:
        kind = "fused" if fused and borrows(x) else "reference"
    ran[f"{kind} {name}"] += 1
    return kind == "triton"


def native_kernels(x: Tensor, wide: torch.dtype = torch.float32) -> ModuleType | None:
    """Our kernels for CPUs where they run on `x`, to compute in `wide`."""
    if _choice not in ("auto", "native") or wide is not torch.float32 or not borrows(x) or _watched():
        return None
    ours = load_native()
    return ours if x.dtype in ours.DTYPES and ours.library() is not None else None


def _watched() -> bool:
    """Whether somebody traces, counts or differentiates PyTorch's operations as they run: C++ kernels are none."""
    mode = _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
    return not getattr(mode, "hears_kernels", mode is None) or forward_ad._current_level >= 0


def borrows(x: Tensor) -> bool:
    """Whether kernels for CPUs may run: x is there, not empty, in eager mode, and nothing else was asked for."""
    return (
        _choice in ("auto", "native", "fused")
        and x.device.type == "cpu"
        and type(x) in (Tensor, nn.Parameter)
        and x.dtype.is_floating_point
        and x.numel() > 0
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not torch._C._are_functorch_transforms_active()
    )


def load() -> ModuleType:
    """The kernels, imported on first use."""
    from normkit.kernels import triton as ours

    return ours


def load_native() -> ModuleType:
    """Our kernels for CPUs; compiled when the first of them is called, not yet by this."""
    from normkit.kernels import cpu as ours

    return ours


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def runs(x: Tensor, name: str) -> bool:
    """Whether a kernel would run in eager mode; RuntimeError where it was asked for and cannot."""
    if _choice not in ("auto", "triton") or (_choice == "auto" and not x.is_cuda):
        return False
    wrong = _obstacle(x)
    if wrong and _choice == "triton":
        raise RuntimeError(f'kernels("triton") cannot run {name!r}: {wrong}; use kernels("auto")')
    return not wrong


def _obstacle(x: Tensor) -> str:
    if not _importable():
        return "the package triton is not installed"
    if not x.is_cuda and not interpreted():
        return f"x is on {x.device}, and Triton needs a CUDA device (or TRITON_INTERPRET=1 before Python starts)"
    if x.dtype not in DTYPES:
        return f"x is {x.dtype}; there are kernels for float32, bfloat16 and float16"
    if type(x) not in (Tensor, nn.Parameter) or torch._C._are_functorch_transforms_active():
        return "x is a tensor subclass or inside a functional transform"
    return ""


@functools.cache
def _importable() -> bool:
    return importlib.util.find_spec("triton") is not None
