"""Compile every kernel ahead of time for GPUs, and read registers and spills.

`python tests/triton_compile.py 80 90 100` prints a JSON list of rows. TRITON_INTERPRET must not be set.
"""

import contextlib
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from types import SimpleNamespace
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import normkit
from normkit.kernels.rule import find_kernel_rule
from normkit.kernels.triton import columns as channels
from normkit.kernels.triton import launch as launches
from normkit.kernels.triton import plans, rows
from normkit.kernels.triton.launch import column_launch, row_launch

INTEGERS = {"rows", "width", "channels", "programs", "x_stride", "dy_stride"}
FLAGS = {"MASK"}
ACTIVATIONS = {"X", "Y", "DY", "DX", "W", "B", "FACTOR", "OUT", "MORE", "MORE_OUT"}  # of the type of x; others float32
PLANS = (
    ("un(outlier_filtration=True)", torch.bfloat16, True), ("un", torch.float32, False),
    ("batch", torch.float32, False), ("power(groups=0)", torch.float16, False),
)  # fmt: skip


def cases():
    """Yield (kernel, pointers that are None, constants, launch), each option on and off."""
    for width in (384, 4096):
        forward, backward = row_launch(4096, width), row_launch(4096, width, backward=True)
        for kind in ("layer", "rms", "rms_plus_eps", "scale") if width == 384 else ("layer", "scale"):
            plain = {"KIND": kind, "SCALAR": kind == "scale"}
            yield rows.row_forward, set(), plain, forward
            yield rows.row_backward, set(), plain, backward
        yield rows.row_backward, {"W", "DW", "DB"}, {"KIND": "layer", "SCALAR": False}, backward
    yield rows.row_backward, set(), {"KIND": "layer", "SCALAR": False}, row_launch(4096, 8192, backward=True)
    down = column_launch(4096, 512)
    for none in (set(), {"MORE", "MORE_OUT"}):
        yield launches.add_partials, none, {}, down._replace(tile=64, block=32)
    for center in (True, False):
        none, given = set() if center else {"SUM"}, {"CENTER": center}
        rule, moved = {"FINITE", "STEP", "NEXT"}, {"Y", "MEAN", "VAR", "W", "B"}  # unused in launches by Python
        yield channels.column_forward, none | rule | moved, given, down
        yield channels.column_forward, rule | {"MASK", "MEAN", "VAR", "SUM", "SQUARE", "COUNT"}, given, down
        yield channels.merge_moments, none, given, down._replace(tile=64, block=32)
        yield channels.column_backward, {"FINITE", "DX", "VAR", "REMOVED", "FACTOR"}, {**given, "REAL": True}, down
        yield channels.column_backward, {"FINITE", "VAR", "SUMS"}, {**given, "REAL": False}, down


def compile_one(kernel, none, constants, launch, dtype, capability):
    """The compiled kernel's registers and spills, as the driver would see them."""
    signature, constexprs = {}, {}
    for name in kernel.arg_names:
        if name in none:
            constexprs[name] = None
        elif name in ("TILE", "BLOCK"):
            constexprs[name] = launch.tile if name == "TILE" else launch.block
        elif name in constants:
            constexprs[name] = constants[name]
        elif name in INTEGERS:
            signature[name] = "i32"
        elif name == "eps":
            signature[name] = "fp32"
        else:
            signature[name] = "*u8" if name in FLAGS else f"*{dtype}" if name in ACTIVATIONS else "*fp32"
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    keys = {(kernel.arg_names.index(name),): value for name, value in constexprs.items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(kernel.arg_names) if signature[n][0] == "*"}
    source = ASTSource(kernel, signature, keys, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.warps})
    return {"sm": capability, "dtype": dtype, **usage(made)}


def compile_plans(capability):
    """Compile all kernels of some plans, as `plans.compiled` has them made for a device."""
    found = []
    for cache in (plans.kernels, plans.compiled):
        cache.cache_clear()

    def keep(made):
        made.function = 1
        found.append({"sm": capability, "dtype": "of a plan", **usage(made)})

    target = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", capability, 32)))
    with (
        mock.patch("triton.runtime.driver", target),
        mock.patch("torch.cuda.device", return_value=contextlib.nullcontext()),
        mock.patch("triton.compiler.CompiledKernel._init_handles", keep),
    ):
        for spec, dtype, masked in PLANS if capability == 90 else PLANS[:1]:  # the first has every kernel
            norm, x = normkit.make(spec, 512), torch.empty(4096, 512, dtype=dtype)
            mask = torch.ones(4096, dtype=torch.bool) if masked else None
            rule = find_kernel_rule(norm, norm.state())
            form = plans.form(norm, rule, x, mask, "power" in spec, 16, 64)._replace(device=0)
            assert len(plans.kernels(form)) == 3 * 7  # function, warps and shared memory of each
    return found


def usage(made):
    """Name, atomic operations, registers and bytes of spills, by triton's disassembler."""
    atomics = made.asm["ptx"].count("atom.") + made.asm["ptx"].count("red.global")
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: re.search(rf"{name}:(\d+)", text) for name in ("REG", "STACK", "LOCAL")}
    counts = {name.lower(): int(match[1]) if match else None for name, match in found.items()}
    return {"kernel": made.name, "atomics": atomics, **counts}


if __name__ == "__main__":
    targets = [int(word) for word in sys.argv[1:]]
    alone = [
        compile_one(*case, ("bf16", "fp32")[number % 2], capability)
        for capability in targets
        for number, case in enumerate(cases())  # the two types of numbers by turns
        if capability == 90 or number % 3 == 0
    ]
    print(json.dumps(alone + [row for capability in targets for row in compile_plans(capability)]))
