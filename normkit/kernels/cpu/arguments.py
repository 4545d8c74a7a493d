"""Calls of the C++ kernels with structs of arguments, read from `arguments.h`."""

import ctypes
import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from normkit.kernels.cpu.build import SOURCES, library

NUMBERS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float}
POINTERS = {"uint8_t": torch.bool, "int64_t": torch.int64, "float": torch.float32}  # void: the type of x
observers: list[Callable[[str, dict[str, Any]], object]] = []  # called with name and arguments of every kernel call


@functools.cache
def structs() -> dict[str, tuple[type[ctypes.Structure], dict[str, torch.dtype | None]]]:
    """Struct of arguments of each kernel, and types of tensors by field; None: that of x."""
    text = re.sub(r"//.*", "", (SOURCES / "arguments.h").read_text(encoding="utf8"))
    found = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        fields, types = [], {}
        for kind, star, field in re.findall(r"(?:const )?(?:std::)?(\w+)(\*?) (\w+);", body):
            fields.append((field, ctypes.c_void_p if star else NUMBERS[kind]))
            types[field] = POINTERS.get(kind) if star else None
        kernel = re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()
        found[kernel] = type(name, (ctypes.Structure,), {"__slots__": (), "_fields_": fields}), types
    return found


@functools.cache
def _function(kernel: str, dtype: torch.dtype) -> Any:
    loaded, struct = library(), structs()[kernel][0]
    assert loaded is not None
    size = ctypes.c_int64.in_dll(loaded, f"{kernel}_size").value
    if size != ctypes.sizeof(struct):
        raise RuntimeError(f"arguments of {kernel} are {ctypes.sizeof(struct)} bytes in Python, {size} in C++")
    address = ctypes.c_void_p.in_dll(loaded, f"{kernel}_{str(dtype).removeprefix('torch.')}").value
    assert address is not None
    return ctypes.CFUNCTYPE(None, ctypes.POINTER(struct), ctypes.c_int)(address)


def call(kernel: str, **given: Any) -> None:
    """Run a kernel on the arguments that its struct in `arguments.h` names.

    Raises:
        RuntimeError: If a tensor is not contiguous, not on the CPU, or not of the type that the kernel reads.
    """
    for observer in observers:
        observer(kernel, given)
    struct, types = structs()[kernel]
    dtype, values = given["x"].dtype, []
    for name, kind in types.items():
        value = given.get(name, 0)  # `given` keeps temporary tensors alive until the kernel has run
        if isinstance(value, Tensor):
            expected = kind or dtype
            if not (value.is_cpu and value.dtype is expected and value.is_contiguous()):  # C++ would read past it
                raise RuntimeError(
                    f"{kernel} of {dtype}: {name} is {value.dtype} on {value.device}; it must be {expected}, "
                    f"contiguous, on a CPU"
                )
            value = value.data_ptr()
        values.append(value)
    if unknown := given.keys() - types.keys():
        raise AttributeError(f"{kernel} has no argument {', '.join(unknown)}")
    _function(kernel, dtype)(struct(*values), torch.get_num_threads())
