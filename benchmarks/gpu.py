"""Time and count all kernels on a CUDA device, in under 9 minutes.

    python benchmarks/gpu.py OUT [--budget 500] [--only launches steps speed]
    python benchmarks/gpu.py OUT --dry          the script itself, at tiny sizes, under Triton's interpreter on a CPU

Ratios are taken within 60 rounds, in which providers take turns; before each call 1 GiB is overwritten, which empties
the L2 cache and lets the host run ahead of the device. `noise` is the first provider's ratio to itself. Times are
between CUDA events. A fraction of the ceiling is (the fewest bytes that the operation must move / time) / (bytes / time
of a copy of 1 GiB, measured in the same run). A section that fails is listed in failures.json, and the others go on.
The results are small files in the folder OUT.
"""

# ruff: noqa: E402
import argparse
import contextlib
import functools
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

DRY = "--dry" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from rows import keep
from steps import EARLY, training_step
from torch import Tensor

import normkit
from normkit._util import write_whole
from normkit.bench import ROUNDS, Timings, measure, skip_warmup
from normkit.kernels import reference
from normkit.kernels import triton as kernels

DEVICE = "cpu" if DRY else "cuda"
EPS = 1e-5
SHAPES = [
    (4096, 512), (8192, 768), (32768, 384), (16384, 1024), (16384, 2048), (8192, 4096), (16384, 8192), (65536, 8192),
]  # fmt: skip
SHAPES = [(6, 20), (9, 32)] if DRY else SHAPES
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
Run = Callable[[], object]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(2).add_(0.5).to(dtype)


# -- how fast ---------------------------------------------------------------------------------------------------------


def clock(runs: dict[str, Run]) -> Timings:
    """Times of each run, by turns; the cache is overwritten before each."""
    return measure(runs, 2 if DRY else ROUNDS, device=DEVICE)


def compared(timings: Timings, name: str, base: str) -> dict[str, float | int]:
    """Columns of one run: ms, and its ratio to another."""
    found = timings.ratio(name, base)
    return {"ms": 1e3 * timings.median(name), "low": found.low, "ratio": found.median, "high": found.high,
            "noise": timings.noise, "rounds": found.rounds}  # fmt: skip


@functools.cache
def ceiling() -> float:
    """Bytes per second of a large copy, reading and writing counted."""
    source = torch.empty((1 << 12) if DRY else (1 << 30), dtype=torch.int8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / clock({"copy": lambda: target.copy_(source)}).median("copy")


def speed() -> Iterator[dict]:
    """Row norms and batch statistics, forward and backward, beside the ceiling."""
    for n, c in SHAPES:
        for dtype, kind in DTYPES.items():
            torch._dynamo.reset()
            forward, backward = timed(n, c, kind)
            for side, runs, plain in (("forward", forward, 2), ("backward", backward, 3)):
                moves = {"batch": plain + (1 if side == "forward" else 2)}
                timings = clock(runs)
                for name in runs:
                    moved = n * c * kind.itemsize * moves.get(name.split(maxsplit=1)[0], plain)
                    yield {
                        "rows": n, "channels": c, "dtype": dtype, "side": side, "run": name,
                        "of_ceiling": moved / timings.median(name) / ceiling(),
                        **compared(timings, name, "layer ours"),
                    }  # fmt: skip


PEERS: dict[str, dict[str, tuple[str, str, Callable]]] = {  # norm: package: module, its function, how it is called
    "layer": {
        "liger": ("liger_kernel.ops.layer_norm", "LigerLayerNormFunction", lambda f, x, w, b: f.apply(x, w, b, EPS)),
        "torchnorm": ("torchnorm._triton", "fused_layer_norm", lambda f, x, w, b: f(x, w, b, EPS)),
    },
    "rms": {
        "liger": ("liger_kernel.ops.rms_norm", "LigerRMSNormFunction",  # its default writes dx over our dy
                  lambda f, x, w, b: f.apply(x, w, EPS, 0.0, "llama", False)),
        "torchnorm": ("torchnorm._triton", "fused_rms_norm", lambda f, x, w, b: f(x, w, EPS)),
    },
}  # fmt: skip
OURS: dict[str, Callable] = {
    "layer": lambda x, w, b: reference.NormalizeRows.apply(x, w, b, "layer", EPS, 1, kernels),
    "rms": lambda x, w, b: reference.NormalizeRows.apply(x, w, None, "rms", EPS, 1, kernels),
}
TORCH: dict[str, Callable] = {
    "layer": lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
    "rms": lambda x, w, b: F.rms_norm(x, w.shape, w, EPS),
}


def providers(norm: str) -> dict[str, Callable]:
    """Our kernel, PyTorch, and the packages that can be imported, as functions of (x, w, b)."""
    found = {"ours": OURS[norm], "torch": TORCH[norm]}
    if not DRY:
        found["compiled"] = torch.compile(TORCH[norm], dynamic=False)
    for who, (module, function, call) in PEERS[norm].items():
        with contextlib.suppress(Exception):  # a package for other GPUs may fail in any way
            found[who] = functools.partial(call, getattr(importlib.import_module(module), function))
    return found


def timed(n: int, c: int, kind: torch.dtype) -> tuple[dict[str, Run], dict[str, Run]]:
    """Runs of forward and backward at one shape, by name: "operation provider"."""
    x, dy = draw(n, c, dtype=kind).requires_grad_(), draw(n, c, dtype=kind)
    w, b = draw(c, dtype=kind).requires_grad_(), draw(c, dtype=kind).requires_grad_()
    forward: dict[str, Run] = {}
    backward: dict[str, Run] = {}
    for op in ("layer", "rms"):
        for who, norm in providers(op).items():
            run = functools.partial(norm, x, w, b)
            inputs = [x, w, b] if op == "layer" else [x, w]
            try:  # a peer may refuse a shape, a type or this version of torch
                back = functools.partial(torch.autograd.grad, run(), inputs, dy, retain_graph=True)
                back()
            except Exception as error:
                print(f"{op} {who} ({n}, {c}) {kind}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            forward[f"{op} {who}"], backward[f"{op} {who}"] = run, back
    for op, spec in (("power", "power(groups=0)"), ("batch", "batch"), ("un", "un")):
        norm = skip_warmup(normkit.make(spec, c)).to(DEVICE, kind)
        forward[f"{op} ours"] = functools.partial(norm, x)
        backward[f"{op} ours"] = functools.partial(
            torch.autograd.grad, norm(x), [x, norm.weight, norm.bias], dy, retain_graph=True
        )
    return forward, backward


# -- launches and steps -----------------------------------------------------------------------------------------------


def launches() -> Iterator[dict]:
    """Count launches and waits of a forward and backward of each norm, by the profiler."""
    activity = torch.profiler.ProfilerActivity
    for choice in ("reference", "triton"):
        for spec in normkit.NORMS:
            norm = skip_warmup(normkit.make(spec, 16 if DRY else 512)).to(DEVICE).train()
            x, dy = draw(*SHAPES[0]), draw(*SHAPES[0])
            x, dy = (draw(8, 4, norm.dim).requires_grad_(), draw(8, 4, norm.dim)) if DRY else (x.requires_grad_(), dy)
            row = {"norm": spec, "kernels": choice, "launches": "", "syncs": "", "ran": ""}
            try:
                with normkit.kernels(choice if choice == "reference" or DRY else "auto") as ran:
                    norm(x).backward(dy)
                    if not DRY:
                        torch.cuda.synchronize()  # so the host has read the number of steps
                    kinds = [activity.CPU] if DRY else [activity.CPU, activity.CUDA]
                    with torch.profiler.profile(activities=kinds) as profile:
                        norm(x).backward(dy)
                events = {event.key: event.count for event in profile.key_averages()}
                row["launches"] = sum(k for name, k in events.items() if "LaunchKernel" in name)
                # the profiler waits once itself, at its end
                row["syncs"] = sum(k for name, k in events.items() if "Synchronize" in name and "Device" not in name)
                row["ran"] = "; ".join(f"{name} {count}" for name, count in sorted(ran.items()))
            except Exception as error:
                row["ran"] = f"{type(error).__name__}: {str(error)[:160]}"
            yield row


NORMS = ("layer", "rms", "batch", "power", "power(groups=0)", "un", "un" + EARLY)


def steps() -> Iterator[dict]:
    """Time training steps of two models; norms are past their warm-up."""
    for size, precision in [("dry", "bf16")] if DRY else [("iwslt14", "bf16"), ("multi30k", "fp32")]:
        made = {spec: training_step(size, spec, DEVICE, bf16=precision == "bf16") for spec in NORMS}
        in_reference = normkit.kernels("reference")
        runs = {**made, **{f"{spec}, reference": in_reference(made[spec]) for spec in ("layer", "un")}}
        timings = clock(runs)
        for name in runs:
            yield {"model": size, "precision": precision, "norm": name, **compared(timings, name, "layer")}


# -- the whole --------------------------------------------------------------------------------------------------------


SECTIONS: dict[str, tuple[Callable[[], Iterator[dict]], tuple[str, ...]]] = {  # its rows, and what names one
    "launches": (launches, ("norm", "kernels")),
    "steps": (steps, ("model", "precision", "norm")),
    "speed": (speed, ("rows", "channels", "dtype", "side", "run")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds, after which no row is begun")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        return print("no CUDA device; --dry tries the script itself on a CPU", file=sys.stderr) or 2
    begun, failures = time.monotonic(), {}
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for name in given.only:
        make, key = SECTIONS[name]
        found: list[dict] = []
        try:
            for row in make():
                found.append({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
                if time.monotonic() - begun > given.budget:
                    failures[name] = f"cut after {len(found)} rows: the budget was spent"
                    break
        except Exception:
            failures[name] = traceback.format_exc(limit=6)
        if found:
            keep(given.out / f"{name}.csv", found[0], key, found)
        print(f"{name}: {len(found)} rows, {time.monotonic() - begun:.0f} s so far", flush=True)
    import triton

    machine = {
        "device": "dry" if DRY else torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "python": sys.version.split()[0], "dry": DRY, "copy_bytes_per_s": ceiling(),
        "seconds": round(time.monotonic() - begun),
    }  # fmt: skip
    for name, content in (("machine", machine), ("failures", failures)):
        write_whole(given.out / f"{name}.json", f"{json.dumps(content, indent=1)}\n".encode())
    print(json.dumps(machine), *(f"\nFAILED {name}: {text}" for name, text in failures.items()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
