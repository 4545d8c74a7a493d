"""A driver of no device: runs the kernels that C++ launches (`launches.h`) in Triton's interpreter."""

import ctypes

import pytest
import torch

from normkit.kernels import dispatch, step
from normkit.kernels.triton import plan

POINTERS = {**{name: dtype for dtype, name in plan.ADDRESSES.items()}, "*i64": torch.int64, "*u8": torch.uint8}
NUMBERS = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
SWITCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class Driver:
    """Its functions, and the kernels of plans, whose handles are their places in a list."""

    def __init__(self):
        self.kernels, self.launched, self.failure = [], [], None
        self.callbacks = LAUNCH(self.launch), SWITCH(lambda context: 0), SWITCH(lambda context: 0)

    def addresses(self, device):
        return *(ctypes.cast(callback, ctypes.c_void_p).value for callback in self.callbacks), 0

    def compiled(self, kernel, given, constants, dtypes, channels, device):
        types = {**dict.fromkeys(plan.ACTIVATIONS, dtypes[0]), **dict.fromkeys(plan.PARAMETERS, dtypes[1])}
        types = plan.TYPES | {name: plan.ADDRESSES[dtype] for name, dtype in types.items()}
        self.kernels.append((kernel, given, dict(constants), types))
        return len(self.kernels), 4, 0

    def launch(self, function, x, y, z, threads, one, other, shared, stream, parameters, extra):
        try:
            kernel, given, constants, types = self.kernels[function - 1]
            assert (z, threads, one, other, shared) == (1, 128, 1, 1, 0)
            kernel[(x, y)](*self.arguments(kernel, given, constants, types, parameters), **constants)
            self.launched.append(kernel.fn.__name__)
        except BaseException as failure:
            self.failure = failure
            return 1
        return 0

    def arguments(self, kernel, given, constants, types, parameters):
        """Read the parameters as the device would: those that are None are not among them."""
        index = 0
        for name in kernel.arg_names:
            if name in constants:
                continue
            if name.isupper() and name not in given:
                yield None
                continue
            kind, here, index = types.get(name, "*fp32"), parameters[index], index + 1
            if kind in NUMBERS:
                yield NUMBERS[kind].from_address(here).value
            else:
                first = (ctypes.c_char * 8).from_address(ctypes.c_uint64.from_address(here).value)
                yield torch.frombuffer(first, dtype=POINTERS[kind])[:1]


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """Let C++ launch on the CPU, where kernels are interpreted; on a device, as it does."""
    ours, forget = Driver(), plan.kernels.cache_clear
    if dispatch.is_interpreted():
        forget()
        monkeypatch.setattr(plan, "driver", ours.addresses)
        monkeypatch.setattr(plan, "compiled", ours.compiled)
        monkeypatch.setattr(step, "_can_launch", lambda x: True)
    yield ours
    forget()
    assert ours.failure is None, ours.failure
