"""A driver that runs what C++ launches in Triton's interpreter, on CPU tensors."""

import ctypes
import functools
import traceback
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter

from normkit.kernels import dispatch, native
from normkit.kernels.triton import plans

ADDRESSES = {"*fp32": torch.float32, "*bf16": torch.bfloat16, "*fp16": torch.float16, "*i64": torch.int64,
             "*u8": torch.uint8}  # fmt: skip
NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
SWITCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

kernels: dict[int, tuple[Any, dict[str, str], dict[str, Any]]] = {}  # kernel, signature and constants, by handle


def handle(kernel: Any, signature: dict[str, str], constants: dict[str, Any]) -> int:
    """Return the handle of a kernel for parameters of these types."""
    kernels[len(kernels) + 1] = kernel, signature, constants  # 0 stands for a kernel that a plan leaves out
    return len(kernels)


def launch(function: int, x: int, y: int, *others: Any) -> int:
    """Run a kernel as the driver's `cuLaunchKernel` would; return 1 if it fails."""
    try:
        kernel, signature, constants = kernels[function]
        kernel[(x, y)](*_arguments(signature, constants, others[-2]), **constants)
    except Exception:
        traceback.print_exc()  # C++ stands between it and who called
        return 1
    return 0


def _arguments(signature: dict[str, str], constants: dict[str, Any], parameters: Any) -> Iterator[Any]:
    """Read the parameters, among which addresses that are not given are missing."""
    index = 0
    for name, kind in signature.items():
        if kind == "constexpr":
            if name not in constants:
                yield None
            continue
        here, index = parameters[index], index + 1
        if kind in NUMBERS:
            yield NUMBERS[kind].from_address(here).value
        else:
            first = (ctypes.c_char * 8).from_address(ctypes.c_uint64.from_address(here).value)
            yield torch.frombuffer(first, dtype=ADDRESSES[kind])[:1]


_callbacks = LAUNCH(launch), SWITCH(lambda context: 0), SWITCH(lambda context: 0)
driver = *(ctypes.cast(callback, ctypes.c_void_p).value or 0 for callback in _callbacks), 0


@functools.cache
def compiled(kernel, given, constants, dtypes, channels, device) -> tuple[int, int, int]:
    """As `plans.compiled`, for the interpreter."""
    fixed = dict(constants)
    warps = fixed.pop("num_warps")
    return handle(kernel, plans.types_of(kernel.arg_names, given, fixed, dtypes), fixed), warps, 0


def patch_once(function: Any, patch: Any = interpreter._patch_lang) -> Any:
    """Skip what the interpreter does again in each call of a device function, for speed."""
    languages = [each for each in function.__globals__.values() if each is tl or each is tl.core]
    is_new = any(tl.core.is_builtin(language.load) for language in languages)
    return patch(function) if is_new else interpreter._LangPatchScope()


def install() -> None:
    """Let C++ launch on CPU tensors by this driver."""
    interpreter._patch_lang = patch_once
    plans.driver, plans.compiled = (lambda device: driver), compiled
    can_step = native.can_step
    native.can_step = lambda x, parameters: can_step(x.to("meta"), parameters) and not dispatch.is_traced()
    torch._C._cuda_getCurrentRawStream = lambda device: 0
