"""Plans of training steps: kernels for `launches.h` to launch, compiled once.

A plan lists numbers: addresses of the driver's functions, the device's context and stream, grids, and the kernels. The
code of a kernel depends on which of its addresses are given, so both sides must agree on that: here by names, in
`launches.h` by addresses that are null.
"""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels.rule import KernelRule, Rule
from normkit.kernels.triton import columns, rules
from normkit.kernels.triton.launch import cdiv, column_launch, sum_grid, sum_launch

ACTIVATIONS = {"X", "Y", "DY", "DX"}
PARAMETERS = {"W", "B", "FACTOR", "DW", "DB"}
ADDRESSES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
TYPES = {  # by name; activations and parameters have those of the model, other addresses are of float32
    **dict.fromkeys(("STEP", "NEXT", "SKIPPED", "FILTERED", "END"), "*i64"), "MASK": "*u8", "OUTLIER": "*u8",
    "warmup": "i64", **dict.fromkeys(("eps", "rate", "floor"), "fp32"),
    **dict.fromkeys(("rows", "channels", "x_stride", "dy_stride", "programs", "shares", "blocks", "size"), "i32"),
}  # fmt: skip


class Form(NamedTuple):
    """All that the code of a plan's kernels depends on."""

    forward: str
    backward: str
    unbiased: bool
    clamp: bool
    center: bool
    known: bool  # the statistics, in advance
    real: bool  # gradient statistics sum over real rows
    given: frozenset[str]  # parameters, mask and buffers
    dtypes: tuple[torch.dtype, torch.dtype]  # of activations, of parameters
    channels: int
    tile: int  # rows
    sum_tile: int  # shares
    device: int | None


def plan(norm: Rule, rule: KernelRule, x: Tensor, mask: Tensor | None, known: bool) -> list[int]:
    """Return the fields of `Plan` in `launches.h`."""
    device = x.device.index
    tile, sum_tile, *grids = _grids(x.numel() // x.shape[-1], x.shape[-1])
    stream = torch._C._cuda_getCurrentRawStream(device)
    return [*driver(device), stream, *grids, *kernels(form(norm, rule, x, mask, known, tile, sum_tile))]


def form(
    norm: Rule, rule: KernelRule, x: Tensor, mask: Tensor | None, known: bool, tile: int, sum_tile: int
) -> Form:  # fmt: skip
    """Return what the kernels of a step depend on."""
    weight, real = norm.weight, mask is not None and norm.pad_grad == "real"
    tensors = {
        "W": weight, "B": norm.bias, "MASK": mask, "WINDOW": rule.window, "WINDOW_GRAD": rule.window_grad,
        "SMOOTH_GRAD": rule.smooth_grad, "FILTERED": rule.filtered,
        "END": rule.warmup if isinstance(rule.warmup, Tensor) else None,
    }  # fmt: skip
    return Form(
        rule.forward, rule.backward, rule.unbiased, rule.clamp, norm.center, known, real,
        frozenset(name for name, tensor in tensors.items() if tensor is not None),
        (x.dtype, torch.float32 if weight is None else weight.dtype), x.shape[-1], tile, sum_tile, x.device.index,
    )  # fmt: skip


@functools.lru_cache(4096)
def _grids(rows: int, channels: int) -> tuple[int, int, int, int, int]:
    """Tiles of rows and of shares; programs along rows and channels, and of a rule."""
    launch = column_launch(rows, channels)
    sum_tile = sum_launch(launch.programs, channels)["TILE"]
    return launch.tile, sum_tile, launch.programs, cdiv(channels, launch.block), *sum_grid(channels)


@functools.cache
def driver(device: int | None) -> tuple[int, ...]:
    """Addresses of the driver's functions, and its context."""
    functions, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    names = "cuLaunchKernel", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
    addresses = (ctypes.cast(getattr(functions, name), ctypes.c_void_p).value or 0 for name in names)
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # creates the context
        error = functions.cuCtxGetCurrent(ctypes.byref(context))
    if error or not context.value:
        raise RuntimeError(f"the driver has no context of cuda:{device} (error {error})")
    return *addresses, context.value


@functools.cache
def kernels(form: Form) -> tuple[int, ...]:
    """Return function, warps and shared memory of each kernel in `KernelIndex`.

    Zeros stand for a kernel that is not launched.
    """
    given, center, known, absent = form.given, form.center, form.known, (0, 0, 0)
    mean, sum_ = ({"MEAN"}, {"SUM"}) if center else (set(), set())
    weight = {"FACTOR"} if "W" in given else set()
    mask, affine, end = given & {"MASK"}, given & {"W", "B"}, given & {"END"}
    saved = {"SAVED_GRAD", "SAVED_GAMMA"} if form.forward == "running" else set()
    finite = set() if form.backward == "exact" else {"FINITE"}
    outlier, excess = ({"OUTLIER"}, {"EXCESS", "FILTERED"}) if "FILTERED" in given else (set(), set())
    shares = {"SQUARE", "COUNT", "FINITE", "NEXT"} | sum_
    factors = {"DY", "X", "VAR"} | mask | mean | weight
    down = {**column_launch(1, form.channels).meta, "TILE": form.tile, "CENTER": center}
    across = {**sum_launch(1, form.channels), "TILE": form.sum_tile, "CENTER": center}

    def made(kernel: Any, names: set[str], **fixed: Any) -> tuple[int, ...]:
        return compiled(kernel, frozenset(names), tuple(fixed.items()), form.dtypes, form.channels, form.device)

    return (
        *made(
            columns.column_forward,
            {"X", "STEP"} | shares | mask | ({"Y", "VAR"} | mean | affine if known else set()), **down,
        ),
        *(made(rules.window_excess, {"RUNNING", "WINDOW", "EXCESS"} | shares, **across) if outlier else absent),
        *made(
            rules.train_rule,
            {"RUNNING", "STEP", "SKIPPED", "BATCH", "VALUE", "TOTAL"} | shares | saved | end | outlier | excess
            | given & {"WINDOW", "SMOOTH_GRAD"},
            **across, RULE=form.forward, UNBIASED=form.unbiased,
        ),
        *made(columns.column_forward, {"X", "Y", "VAR"} | mean | affine, **down),
        *made(
            columns.column_backward, {"SUMS"} | factors | finite | ({"DX", "REMOVED"} if known else set()),
            **down, REAL=form.real,
        ),
        *made(
            rules.grad_rule,
            {"SUMS", "COUNT", "STEP", "SKIPPED"} | finite | saved | end | outlier | (set() if known else {"REMOVED"})
            | given & {"W", "WINDOW_GRAD", "SMOOTH_GRAD"} | {f"D{name}" for name in affine},
            **across, REAL=form.real, RULE=form.backward, CLAMP=form.clamp,
        ),
        *(absent if known else made(
            columns.column_backward, {"DX", "REMOVED"} | factors, **down, REAL=form.real,
        )),
    )  # fmt: skip


def types_of(
    names: list[str], given: frozenset[str], fixed: dict[str, Any], dtypes: tuple[torch.dtype, torch.dtype]
) -> dict[str, str]:
    """Types of a kernel's parameters by name: numbers, the addresses given, constants."""
    types = TYPES | dict.fromkeys(ACTIVATIONS, ADDRESSES[dtypes[0]]) | dict.fromkeys(PARAMETERS, ADDRESSES[dtypes[1]])
    return {
        name: "constexpr" if name in fixed or (name.isupper() and name not in given) else types.get(name, "*fp32")
        for name in names
    }


@functools.cache
def compiled(
    kernel: Any, given: frozenset[str], constants: tuple[tuple[str, Any], ...], dtypes: tuple[torch.dtype, torch.dtype],
    channels: int, device: int | None,
) -> tuple[int, int, int]:  # fmt: skip
    """Compile a kernel for the addresses given; return function, warps and shared memory."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver as triton_driver

    names, fixed = kernel.arg_names, dict(constants)
    warps, signature = fixed.pop("num_warps"), types_of(names, given, fixed, dtypes)
    values = {(i,): fixed.get(name) for i, name in enumerate(names) if signature[name] == "constexpr"}
    whole = {"channels", "x_stride", "dy_stride"} if channels % 16 == 0 else set()
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if signature[name] != "constexpr" and name in ACTIVATIONS | whole
    }
    with torch.cuda.device(device):
        target = triton_driver.active.get_current_target()
        made = triton.compile(ASTSource(kernel, signature, values, aligned), target, {"num_warps": warps})
        made._init_handles()
    return made.function, made.metadata.num_warps, made.metadata.shared
