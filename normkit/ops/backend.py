"""Which implementation of the ops runs, plain PyTorch ("reference"), fused kernels of its or Triton, and what ran."""

import collections
import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor, nn

CHOICES = ("auto", "reference", "triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_choice = "auto"
ran: collections.Counter[str] = collections.Counter()  # "triton layer", "fused layer", ...: calls so far


@contextlib.contextmanager
def kernels(choice: str) -> Iterator[collections.Counter[str]]:
    """Choose what ops run on within the block, in all threads; yields a counter of what ran in it.

    - "auto": in eager mode, Triton kernels for float32, bfloat16 and float16 tensors on CUDA where triton can be
      imported, and PyTorch's own fused kernels on a CPU; the reference elsewhere and under `torch.compile`.
    - "reference": plain PyTorch everywhere. It can be differentiated twice; the kernels cannot.
    - "triton": kernels, under `torch.compile` too, or a RuntimeError that says what is missing. CPU tensors work
      only under Triton's interpreter (`TRITON_INTERPRET=1` before Python starts).

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
    before, counted = _choice, ran.copy()
    here: collections.Counter[str] = collections.Counter()
    _choice = choice
    try:
        yield here
    finally:
        _choice = before
        here.update(ran - counted)


def triton(x: Tensor, name: str, *, fused: bool = True) -> bool:
    """Whether the op `name` of `x` runs as a Triton kernel now; remembers the answer in `ran`.

    `fused`: whether it has a path through PyTorch's fused kernels on a CPU.
    """
    if torch.compiler.is_compiling():
        return _choice == "triton" and x.dtype in DTYPES
    answer = runs(x, name)
    ran[f"{'triton' if answer else 'fused' if fused and borrows(x) else 'reference'} {name}"] += 1
    return answer


def borrows(x: Tensor) -> bool:
    """Whether ops of `x` go through PyTorch's fused kernels: on a CPU, eager, not empty, and nothing else asked for."""
    return (
        _choice == "auto"
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
    import normkit.ops.triton as ours

    return ours


def interpreted() -> bool:
    """Whether Triton interprets kernels on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def runs(x: Tensor, name: str) -> bool:
    """Whether a kernel would run in eager mode; RuntimeError where it was asked for and cannot."""
    if _choice == "reference" or (_choice == "auto" and not x.is_cuda):
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
