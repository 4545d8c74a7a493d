"""Training steps launched from C++ (`launches.h`), against the same steps launched from Python.

`test_triton.py` runs this file with Triton's interpreter on a CPU, where a driver of our own runs each kernel that C++
launches, and on a CUDA device without either.
"""

import ctypes

import pytest
import torch
from norm_cases import WITH_KERNEL_RULE, several_steps
from torch.utils.checkpoint import checkpoint

import normkit
from normkit.kernels import dispatch, step
from normkit.kernels.cpu import build
from normkit.kernels.triton import plan

REAL = not dispatch.is_interpreted()
DEVICE = "cuda" if REAL else "cpu"
POINTERS = {"*i64": torch.int64, "*u8": torch.uint8, "*fp32": torch.float32}
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, *[ctypes.c_uint] * 7, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)  # fmt: skip
SWITCH = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim"),  # triton 3.6's own
    pytest.mark.skipif(build.step_op() is None, reason="there is no C++ compiler"),
]


class Driver:
    """Runs kernels that C++ launches in the interpreter; the driver of no device."""

    def __init__(self):
        self.kernels, self.launched, self.failure = [], [], None
        self.callbacks = LAUNCH(self.launch), SWITCH(lambda context: 0), SWITCH(lambda context: 0)

    def addresses(self, device):
        return *(ctypes.cast(callback, ctypes.c_void_p).value for callback in self.callbacks), 0

    def compiled(self, kernel, given, constants, warps, dtype, channels, device):
        self.kernels.append((kernel, given, dict(constants), dtype))
        return len(self.kernels), warps, 0

    def launch(self, function, x, y, z, threads, one, other, shared, stream, parameters, extra):
        try:
            kernel, given, constants, dtype = self.kernels[function - 1]
            assert (z, threads, one, other, shared) == (1, 128, 1, 1, 0)
            kernel[(x, y)](*self.arguments(kernel, given, constants, dtype, parameters), **constants)
            self.launched.append(kernel.fn.__name__)
        except BaseException as failure:
            self.failure = failure
            return 1
        return 0

    def arguments(self, kernel, given, constants, dtype, parameters):
        """Read the parameters as the device would: those that are None are not among them."""
        index = 0
        for name in kernel.arg_names:
            if name in constants:
                continue
            if name.isupper() and name not in given:
                yield None
                continue
            kind = "x" if name in plan.ACTIVATIONS else plan.TYPES.get(name, "*fp32")
            here, index = parameters[index], index + 1
            if kind in ("i32", "i64", "fp32"):
                number = {"i32": ctypes.c_int32, "i64": ctypes.c_int64, "fp32": ctypes.c_float}[kind]
                yield number.from_address(here).value
            else:
                first = (ctypes.c_char * 8).from_address(ctypes.c_uint64.from_address(here).value)
                yield torch.frombuffer(first, dtype=dtype if kind == "x" else POINTERS[kind])[:1]


@pytest.fixture
def driver(monkeypatch):
    forget = plan.kernels.cache_clear
    forget()
    ours = Driver()
    if not REAL:
        monkeypatch.setattr(plan, "driver", ours.addresses)
        monkeypatch.setattr(plan, "compiled", ours.compiled)
        monkeypatch.setattr(step, "_can_launch", lambda x: x.is_contiguous())
    yield ours
    forget()
    assert ours.failure is None, ours.failure


def draw(*shape, dtype=torch.float32):
    return (torch.randn(*shape) * 2 + 0.5).to(DEVICE, dtype)


def launched_by_both(monkeypatch, run):
    """Results of `run` where Python launches, then where C++ does."""
    found, calls, in_cpp = [], [], step.run
    monkeypatch.setattr(step, "run", lambda *given: calls.append(given) or in_cpp(*given))
    for cpp in (False, True):
        with monkeypatch.context() as patch:
            if not cpp:
                patch.setattr(step, "can_run", lambda *_: False)
            torch.manual_seed(0)
            found.append(run(cpp))
        assert bool(calls) == cpp
    return found


def equal(python, cpp):
    for a, b in zip(python, cpp, strict=True):
        torch.testing.assert_close(b, a, **({"rtol": 2e-5, "atol": 2e-5} if REAL else {"rtol": 0, "atol": 0}),
                                   equal_nan=True)  # fmt: skip


@pytest.mark.parametrize(("spec", "masked"), [(spec, i % 2 == 0) for i, spec in enumerate(WITH_KERNEL_RULE)])
def test_steps_launched_by_cpp_are_those_launched_by_python(spec, masked, driver, monkeypatch):
    def run(cpp):
        norm = normkit.make(spec, 40).to(DEVICE)
        for parameter in norm.parameters():
            torch.nn.init.normal_(parameter)
        return several_steps(norm, draw, masked, "triton")

    equal(*launched_by_both(monkeypatch, run))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps_of_halves(dtype, driver, monkeypatch):
    def run(cpp):
        norm, seen = normkit.make("un(window=2, warmup=1)", 48).to(DEVICE), []
        for _ in range(3):
            x = draw(70, 48, dtype=dtype).requires_grad_()
            norm(x).backward(draw(70, 48, dtype=dtype))
            seen += [x.grad, *norm.buffers()]
        return seen

    with normkit.kernels("triton"):
        equal(*launched_by_both(monkeypatch, run))


@pytest.mark.parametrize("spec", ["un(window=2, warmup=1)", "power(groups=0, warmup=1)", "batch"])
def test_what_a_checkpoint_recomputes(spec, driver, monkeypatch):
    def run(cpp):
        norm, seen = normkit.make(spec, 40).to(DEVICE), []
        for _ in range(3):
            x = draw(5, 40).requires_grad_()
            checkpoint(norm, x, use_reentrant=False).backward(draw(5, 40))
            seen += [x.grad, *norm.buffers()]
        assert int(norm.step) == 3
        return seen

    with normkit.kernels("triton"):
        equal(*launched_by_both(monkeypatch, run))


def test_gradients_that_are_not_aligned_or_not_contiguous(driver, monkeypatch):
    def run(cpp):
        norm, seen = normkit.make("batch", 16).to(DEVICE), []
        for dy in (draw(4 * 16 + 1)[1:].view(4, 16), draw(16, 4).t(), draw(1).expand(4, 16)):
            x = draw(4 * 16 + 1)[1:].view(4, 16).requires_grad_()
            norm(x).backward(dy)
            seen.append(x.grad)
        return seen

    with normkit.kernels("triton"):
        equal(*launched_by_both(monkeypatch, run))


def test_both_passes_are_counted(driver):
    norm, x = normkit.make("power(groups=0, warmup=1)", 40).to(DEVICE), draw(6, 40).requires_grad_()
    with normkit.kernels("triton") as ran:
        norm(x).backward(draw(6, 40))
    assert dict(ran) == {"triton moments": 1, "triton standardize_grad": 1}


def test_a_norm_on_another_device_raises(driver):
    norm = normkit.make("batch", 8).to("meta")
    with normkit.kernels("triton"), pytest.raises(RuntimeError, match="weight is Float on meta; it must be Float"):
        norm(draw(4, 8))


if not REAL:

    def test_a_failing_launch_raises(driver, monkeypatch):
        driver.kernels = [None] * 9  # those of the plan are gone
        monkeypatch.setattr(plan, "kernels", lambda form: (1, 4, 0) * 7)
        with normkit.kernels("triton"), pytest.raises(RuntimeError, match="cuLaunchKernel failed with error 1"):
            normkit.make("batch", 8)(draw(4, 8))
        assert isinstance(driver.failure, TypeError)
        driver.failure = None
