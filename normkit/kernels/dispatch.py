"""Selection of the implementation of an operation: Triton, C++ or plain PyTorch."""

import collections
import contextlib
import functools
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from normkit.kernels import build, native, reference

CHOICES = ("auto", "triton", "native", "reference")
ENVIRONMENT = os.environ.get("NORMKIT_KERNELS") or "auto"  # read once: a look-up takes microseconds of every call
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LONGEST = 8192  # channels of a row that one program in Triton holds in registers; 16384 spill
SMALL = 1 << 22  # numbers; at 4096 x 512 Triton saves an H200 at most 0.007 ms a norm, and costs the host 0.4 ms
PROXY = torch._C._TorchDispatchModeKey.PROXY  # type: ignore[attr-defined]  # of torch.fx's make_fx


@dataclass(slots=True, eq=False)
class KernelsBlock:
    """One `with kernels(...)` block: choice, the block around it, and counts."""

    choice: str
    outer: "KernelsBlock | None"
    ran: collections.Counter[str] = field(default_factory=collections.Counter)


_block: ContextVar[KernelsBlock | None] = ContextVar("normkit_kernels", default=None)
# of all threads: those of autograd on a GPU, which recompute checkpoints, see no ContextVar
_entered: list[KernelsBlock] = []


@contextlib.contextmanager
def kernels(choice: str) -> Iterator[collections.Counter[str]]:
    """Choose the implementation of ops within a block.

    The choice holds in this thread (or task of asyncio). Other threads keep their own blocks; outside of any block
    `NORMKIT_KERNELS` in the environment decides, as it was at the import, else "auto". Autograd runs backward passes on
    a GPU in a thread of its own: there the choice of the forward pass holds. Compiled graphs take the reference, which
    Inductor fuses. What activation checkpointing recomputes takes the choice at that moment: run the backward pass in
    the block, too.

    Args:
        choice: One of

            - "auto": in eager mode the first of the next two that can run; else the reference. PyTorch's own kernels of
              LayerNorm and RMSNorm go first on a GPU, up to 4 million numbers.
            - "triton": Triton kernels for float32, bfloat16 and float16 tensors on CUDA; needs the package triton.
              CPU tensors need its interpreter (`TRITON_INTERPRET=1` before Python starts).
            - "native": C++ kernels for float32 and bfloat16 on a CPU; needs Linux and a C++ compiler on first use.
            - "reference": plain PyTorch. Per-token norms can be differentiated twice; norms with batch statistics
              cannot while they train, with any implementation.

    Yields:
        A counter of what ran in the block, such as `{"triton layer": 2}`.

    Raises:
        ValueError: If the choice is unknown.
        RuntimeError: If the choice cannot run on this machine, or (for "triton", when an op is called) on its tensor.

    Examples:
        >>> with kernels("reference") as ran:
        ...     _ = select(torch.ones(2, 4), "layer")
        >>> dict(ran)
        {'reference layer': 1}
    """
    if choice not in CHOICES:
        raise ValueError(f"kernels must be one of {', '.join(CHOICES)}; got {choice!r}")
    if choice == "native" and (why := build.obstacle()):
        raise RuntimeError(f'kernels("native") cannot run: {why}; use kernels("auto")')
    block = KernelsBlock(choice, _block.get())
    token = _block.set(block)
    _entered.append(block)
    try:
        yield block.ran
    finally:
        _entered.remove(block)
        _block.reset(token)


def current_choice() -> str:
    """Choice of this thread: of the innermost block, else of the environment."""
    if block := _block.get() or (_innermost() if _entered else None):
        return block.choice
    if ENVIRONMENT not in CHOICES:
        raise ValueError(f"NORMKIT_KERNELS must be one of {', '.join(CHOICES)}; it is {ENVIRONMENT!r}")
    return ENVIRONMENT


def _innermost() -> KernelsBlock | None:
    block = _block.get()
    if block is None and _entered and isinstance(threading.current_thread(), threading._DummyThread):
        return _entered[-1]
    return block


def select(
    x: Tensor,
    name: str,
    wide: torch.dtype = torch.float32,
    *,
    width: int = 0,
    has_native: bool = True,
) -> str:
    """Select "triton", "native" or "reference" for an operation on `x`, and count it.

    Args:
        x: Its main argument.
        name: Its name.
        wide: Type of its vectors `[C]`.
        width: Channels that are normalized together; 0 for an operation on columns.
        has_native: C++ implements the operation for these arguments.

    Raises:
        RuntimeError: If "triton" was chosen and cannot run on `x`.
    """
    if torch.compiler.is_compiling():  # Inductor fuses it, and cannot look into a kernel
        return "reference"
    kind = choose(x, name, wide, width, has_native)
    count(kind, name)
    return kind


def choose(x: Tensor, name: str, wide: torch.dtype, width: int = 0, has_native: bool = True) -> str:
    """As `select` in eager mode; the caller counts."""
    choice = current_choice()
    if wide is not torch.float32:
        return "reference"
    if (x.is_cuda or choice == "triton") and can_use_triton(x, name, choice, width):
        return "triton"
    return "native" if has_native and can_use_native(x, choice) and not build.obstacle() else "reference"


def module(kind: str) -> ModuleType:
    """The module that implements operations in this way."""
    return load_triton() if kind == "triton" else {"native": native, "reference": reference}[kind]


def has_torch_kernel(x: Tensor, *parameters: Tensor | None) -> bool:
    """True for an `x` on a GPU, small or of long rows, whose type PyTorch's own kernel takes and returns."""
    return (
        not torch.compiler.is_compiling()  # which would keep a graph for these sizes alone
        and x.is_cuda
        and (0 < x.numel() <= SMALL or x.shape[-1] > LONGEST)
        and current_choice() == "auto"
        and all(p is None or (p.dtype is x.dtype and p.shape == x.shape[-1:]) for p in parameters)
        and (x.dtype is torch.float32 or not torch.is_autocast_enabled("cuda"))  # else it gives float32
    )


def count(kind: str, name: str) -> None:
    """Count an op for the blocks around it."""
    block = _block.get() or (_innermost() if _entered else None)
    while block is not None:
        block.ran[f"{kind} {name}"] += 1
        block = block.outer


def can_use_triton(x: Tensor, name: str, choice: str, width: int = 0) -> bool:
    """Check for a Triton kernel on `x` in eager mode; RuntimeError if chosen in vain."""
    if choice not in ("auto", "triton"):
        return False
    obstacle = _triton_obstacle(x)
    if width > LONGEST:
        obstacle = f"there are kernels for rows of at most {LONGEST} channels; x has {width}"
    if obstacle and choice == "triton":
        raise RuntimeError(f'kernels("triton") cannot run {name!r}: {obstacle}; use kernels("auto")')
    return not obstacle


def can_use_native(x: Tensor, choice: str) -> bool:
    """True if C++ may run on `x`: a plain tensor on a CPU of a type that it takes, in eager mode."""
    return (
        choice in ("auto", "native")
        and x.is_cpu
        and x.dtype in native.DTYPES
        and type(x) in (Tensor, nn.Parameter)
        and x.numel() > 0
        and not torch._C._are_functorch_transforms_active()
        and not is_traced()
    )


def is_plain() -> bool:
    """True in eager mode, without transforms, modes or forward differentiation."""
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    )


def is_traced() -> bool:
    """True if operations are traced, counted or differentiated, where our kernels are missed."""
    mode = _get_current_dispatch_mode() if torch._C._len_torch_dispatch_stack() else None
    return (mode is not None and not getattr(mode, "counts_custom_kernels", False)) or _needs_torch_operations()


def _needs_torch_operations() -> bool:
    """True under `torch.jit.trace` and in forward mode, which miss our kernels."""
    return torch._C._is_tracing() or forward_ad._current_level >= 0  # type: ignore[attr-defined]


def load_triton() -> ModuleType:
    """The Triton kernels, imported on first use because triton is optional."""
    from normkit.kernels import triton

    return triton


def is_interpreted() -> bool:
    """True if Triton interprets kernels on the CPU in this process."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _triton_obstacle(x: Tensor) -> str:
    if not _has_triton():
        return "the package triton is not installed"
    if not x.is_cuda and not is_interpreted():
        return f"x is on {x.device}, and Triton needs a CUDA device (or TRITON_INTERPRET=1 before Python starts)"
    if x.dtype not in TRITON_DTYPES:
        return f"x is {x.dtype}; there are kernels for float32, bfloat16 and float16"
    if type(x) not in (Tensor, nn.Parameter) or torch._C._are_functorch_transforms_active():
        return "x is a tensor subclass or inside a functional transform"
    if _needs_torch_operations() or torch._C._get_dispatch_mode(PROXY):  # type: ignore[attr-defined]
        return "operations are traced or differentiated in forward mode"
    return ""


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
