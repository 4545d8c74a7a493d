"""Calls of the C++ kernels with structs of arguments, read from `arguments.h`."""

import ctypes
import functools
import re
import struct
from collections.abc import Callable
from typing import Any

import torch

from normkit.kernels.build import SOURCES, library

NUMBERS = {"int": "i", "int64_t": "q", "float": "f"}  # as `struct` packs them
POINTERS = {"bool": torch.bool, "int64_t": torch.int64, "float": torch.float32}  # void: the type of x
observers: list[Callable[[str, dict[str, Any]], object]] = []  # called with name and arguments of every kernel call


@functools.cache
def structs() -> dict[str, tuple[struct.Struct, dict[str, torch.dtype | str | None]]]:
    """Struct of each kernel, and types of tensors by field: "x" as x, None for numbers."""
    text = re.sub(r"//.*", "", (SOURCES / "arguments.h").read_text(encoding="utf8"))
    found = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, re.DOTALL):
        fields, types = "@", {}
        for kind, star, field in re.findall(r"(?:const )?(?:std::)?(\w+)(\*?) (\w+);", body):
            fields += "P" if star else NUMBERS[kind]
            types[field] = POINTERS.get(kind, "x") if star else None
        kernel = re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower()
        found[kernel] = struct.Struct(f"{fields}0P"), types  # 0P: C++ fills up to the size of an address
    return found


@functools.cache
def _prepared(kernel: str, dtype: torch.dtype) -> tuple[Any, Callable[..., bytes], dict[str, torch.dtype | str | None]]:
    """Function, packing of its arguments, and types of tensors by field."""
    loaded, (arguments, types) = library(), structs()[kernel]
    assert loaded is not None
    size = ctypes.c_int64.in_dll(loaded, f"{kernel}_size").value
    if size != arguments.size:
        raise RuntimeError(f"arguments of {kernel} are {arguments.size} bytes in Python, {size} in C++")
    address = ctypes.c_void_p.in_dll(loaded, f"{kernel}_{str(dtype).removeprefix('torch.')}").value
    assert address is not None
    function = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int)(address)
    return function, arguments.pack, {name: dtype if kind == "x" else kind for name, kind in types.items()}


def call(kernel: str, **given: Any) -> None:
    """Run a kernel on the arguments that its struct in `arguments.h` names.

    Raises:
        RuntimeError: If a tensor is not contiguous, not on the CPU, or not of the type that the kernel reads.
    """
    for observer in observers:
        observer(kernel, given)
    dtype = given["x"].dtype
    function, pack, types = _prepared(kernel, dtype)
    values = []  # small models wait for this loop, so it does as little as is safe
    for name, expected in types.items():
        value = given.get(name)  # `given` keeps temporary tensors alive until the kernel has run
        if value is None:
            value = 0
        elif expected is not None:
            if value.dtype is not expected or not value.is_contiguous() or not value.is_cpu:  # C++ would read past it
                raise RuntimeError(
                    f"{kernel} of {dtype}: {name} is {value.dtype} on {value.device}; it must be {expected}, "
                    f"contiguous, on a CPU"
                )
            value = value.data_ptr()
        values.append(value)
    if not given.keys() <= types.keys():
        raise AttributeError(f"{kernel} has no argument {', '.join(given.keys() - types.keys())}")
    function(pack(*values), torch.get_num_threads())
