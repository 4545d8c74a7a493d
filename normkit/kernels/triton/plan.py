"""Plans of training steps: kernels that Triton compiles once, for `launches.h` to launch without Python."""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.kernels.kernel_rule import FAST, LARGEST_LAG, NOTICE, SLOW, UNSEEN, KernelRule
from normkit.kernels.triton import column_kernels as columns
from normkit.kernels.triton import rule_kernels as rules
from normkit.kernels.triton.launch import cdiv, column_launch, power_of_2, sum_grid, sum_launch

ACTIVATIONS = {"X", "Y", "DY", "DX"}
TYPES = {
    **dict.fromkeys(("STEP", "NEXT", "SKIPPED", "END"), "*i64"), "MASK": "*u8",
    **dict.fromkeys(("warmup", "until_r", "until_d"), "i64"),
    **dict.fromkeys(("rows", "channels", "x_stride", "dy_stride", "programs", "shares", "size"), "i32"),
    **dict.fromkeys(("eps", "rate", "bound_r", "bound_d", "floor"), "fp32"),
}  # fmt: skip
"""Types of parameters by name; activations have their own, the other addresses are of float32."""

CONSTANTS = {"arithmetic": {"OUTPUT_SCALE"}, "renorm": {"OUTPUT_SCALE", "OUTPUT_SHIFT"}}  # of rules

OPTIONAL = ("W", "B", "MASK", "WINDOW", "WINDOW_GRAD", "SMOOTH", "END", "DRIFT")  # depend on the norm


class Form(NamedTuple):
    """What decides the code of a plan's kernels."""

    forward: str
    backward: str
    unbiased: bool
    exact_early: bool
    clamp: bool
    center: bool
    real: bool
    known: bool  # the statistics, in advance
    given: tuple[bool, ...]  # which of `OPTIONAL` there are
    dtype: torch.dtype
    channels: int
    tile: int  # rows
    sum_tile: int  # shares
    device: int | None


def plan(norm: Any, rule: KernelRule, x: Tensor, mask: Tensor | None, known: bool) -> list[int]:
    """Return the plan of a step: the fields of `Plan` in `launches.h`."""
    channels, device = x.shape[-1], x.device.index
    tile, sum_tile, *grids = _grids(x.numel() // channels, channels)
    given = (
        norm.weight is not None, norm.bias is not None, mask is not None, rule.window is not None,
        rule.window_grad is not None, rule.smooth_grad is not None, isinstance(rule.warmup, Tensor), bool(rule.drift),
    )  # fmt: skip
    form = Form(
        rule.forward, rule.backward, rule.unbiased, rule.exact_early, rule.clamp, norm.center,
        mask is not None and norm.pad_grad == "real", known, given, x.dtype, channels, tile, sum_tile, device,
    )  # fmt: skip
    stream = torch._C._cuda_getCurrentRawStream(device) if x.is_cuda else 0
    return [*driver(device), stream, *grids, *kernels(form)]


@functools.lru_cache(4096)
def _grids(rows: int, channels: int) -> tuple[int, int, int, int, int]:
    """Tiles of rows and of shares, programs along rows, blocks of channels, and programs of a rule."""
    launch = column_launch(rows, channels)
    sum_tile = sum_launch(launch.programs, channels)["TILE"]
    return launch.tile, sum_tile, launch.programs, cdiv(channels, launch.block), *sum_grid(channels)


@functools.cache
def driver(device: int | None) -> tuple[int, ...]:
    """Addresses of the driver's functions, and its context of a device."""
    functions = ctypes.CDLL("libcuda.so.1")
    names = "cuLaunchKernel", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"
    addresses = (ctypes.cast(getattr(functions, name), ctypes.c_void_p).value or 0 for name in names)
    context = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream().synchronize()  # creates the context
        error = functions.cuCtxGetCurrent(ctypes.byref(context))
    if error or not context.value:
        raise RuntimeError(f"the driver has no context of cuda:{device} (error {error})")
    return *addresses, context.value


@functools.cache
def kernels(form: Form) -> tuple[int, ...]:
    """Function, warps and bytes of shared memory of each kernel in `KernelIndex`, zeros where it is not launched."""
    center, channels = form.center, form.channels
    given = {name for name, present in zip(OPTIONAL, form.given, strict=True) if present}
    block = column_launch(1, channels).block
    down = {"TILE": form.tile, "BLOCK": block, "CENTER": center}
    across = {"TILE": form.sum_tile, "BLOCK": sum_launch(1, channels)["BLOCK"], "CENTER": center}
    affine, mean = given & {"W", "B"}, {"MEAN"} if center else set()
    shares = {"SQUARE", "COUNT", "FINITE", "STEP", "NEXT", "MASK"} | ({"SUM"} if center else set())
    constants = CONSTANTS.get(form.forward, set())
    saved = {"SAVED_GRAD", "SAVED_GAMMA"} if form.forward == "running" else set()
    end = given & {"END"}

    def made(kernel: Any, names: set[str], fixed: dict[str, Any], warps: int = 4) -> tuple[int, ...]:
        present = {name for name in names if name != "MASK" or "MASK" in given}
        return compiled(kernel, frozenset(present), tuple(fixed.items()), warps, form.dtype, channels, form.device)

    absent = (0, 0, 0)
    sums = made(columns.column_forward, {"X", *shares, *({"Y", "VAR", *mean, *affine} if form.known else ())}, down)
    rule = made(
        rules.train_rule,
        {"SQUARE", "COUNT", "FINITE", "NEXT", "RUNNING", "STEP", "SKIPPED", "BATCH", "VALUE", "TOTAL", *constants,
         *saved, *({"SUM"} if center else ()), *(given & {"WINDOW"}), *({"SMOOTH_GRAD"} if saved else ()), *end},
        {**across, "RULE": form.forward, "UNBIASED": form.unbiased},
    )  # fmt: skip
    drift = absent if "DRIFT" not in given else made(
        rules.measure_drift, {"BATCH", "STEP", "NEXT", "AVERAGES", "LAG", "END"},
        {"FAST": FAST, "SLOW": SLOW, "LARGEST": LARGEST_LAG, "UNSEEN": UNSEEN, "NOTICE": NOTICE,
         "BLOCK": min(power_of_2(channels), 1024)},
    )  # fmt: skip
    output = made(columns.column_forward, {"X", "Y", "VAR", *mean, *affine, *constants}, down)
    back = {**down, "REAL": form.real}
    factors = {"DY", "X", "MASK", "VAR", *mean, *({"FACTOR"} if "W" in given else ()), *(constants - {"OUTPUT_SHIFT"})}
    finite = set() if form.backward == "exact" else {"FINITE"}
    grad_sums = made(
        columns.column_backward, {*factors, "SUMS", *finite, *({"DX", "REMOVED"} if form.known else ())}, back
    )
    grad_rule = made(
        rules.grad_rule,
        {"SUMS", *finite, "COUNT", "STEP", *constants, *saved, "SKIPPED", *(given & {"W", "SMOOTH"}), *end,
         *({"WINDOW"} if "WINDOW_GRAD" in given else ()), *(() if form.known else {"REMOVED"}),
         *({"DW"} if "W" in given else ()), *({"DB"} if "B" in given else ())},
        {**across, "REAL": form.real, "RULE": form.backward, "EXACT": form.exact_early, "CLAMP": form.clamp},
    )  # fmt: skip
    grad_output = absent if form.known else made(columns.column_backward, {*factors, "DX", "REMOVED"}, back)
    return *sums, *rule, *drift, *output, *grad_sums, *grad_rule, *grad_output


@functools.cache
def compiled(
    kernel: Any, given: frozenset[str], constants: tuple[tuple[str, Any], ...], warps: int, dtype: torch.dtype,
    channels: int, device: int | None,
) -> tuple[int, int, int]:  # fmt: skip
    """Compile a kernel for the addresses that are given: its function, warps and bytes of shared memory."""
    import triton
    from triton.compiler import ASTSource
    from triton.runtime import driver as triton_driver

    names, fixed = kernel.arg_names, dict(constants)
    activation = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}[dtype]
    signature = {
        name: "constexpr" if name in fixed or (name.isupper() and name not in given)
        else activation if name in ACTIVATIONS else TYPES.get(name, "*fp32")
        for name in names
    }  # fmt: skip
    values = {(i,): fixed.get(name) for i, name in enumerate(names) if signature[name] == "constexpr"}
    whole = {"channels", "x_stride", "dy_stride"} if channels % 16 == 0 else set()
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name] != "constexpr" and name in ACTIVATIONS | whole}  # fmt: skip
    with torch.cuda.device(device):
        target = triton_driver.active.get_current_target()
        made = triton.compile(ASTSource(kernel, signature, values, aligned), target, {"num_warps": warps})
        made._init_handles()
    return made.function, made.metadata.num_warps, made.metadata.shared
