"""Check, time and count all kernels on a CUDA device, in under 9 minutes.

    python benchmarks/gpu.py OUT [--budget 500] [--only checks sanitizer launches steps speed]
    python benchmarks/gpu.py OUT --dry          the script itself, at tiny sizes, under Triton's interpreter on a CPU

Ratios are taken within 60 rounds, in which providers take turns; before each call 1 GiB is overwritten, which empties
the L2 cache and lets the host run ahead of the device. `noise` is the first provider's ratio to itself. Times are
between CUDA events. A fraction of the ceiling is (the fewest bytes that the operation must move / time) / (bytes / time
of a copy of 1 GiB, measured in the same run). Where NVIDIA's compute-sanitizer is installed, it checks for accesses out
of bounds and races. A section that fails is listed in failures.json, and the others go on. The results are small files
in the folder OUT.
"""

# ruff: noqa: E402
import argparse
import csv
import functools
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

DRY, SMALL = "--dry" in sys.argv, "--small" in sys.argv
if DRY:
    os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from normkit_papers.models.config import Model
from normkit_papers.models.mt import Seq2Seq
from peers import providers, versions
from torch import Tensor

import normkit
from normkit._util import write_whole
from normkit.bench import ROUNDS, Timings, measure, skip_warmup
from normkit.kernels import ops, reference
from normkit.kernels import triton as kernels

DEVICE = "cpu" if DRY else "cuda"
EPS = 1e-5
SHAPES = [
    (4096, 512), (8192, 768), (32768, 384), (16384, 1024), (16384, 2048), (8192, 4096), (16384, 8192), (65536, 8192),
]  # fmt: skip
SHAPES = [(6, 20), (9, 32)] if DRY else SHAPES
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
BOUND = {"bf16": 6e-3, "fp32": 1e-5}
Run = Callable[[], object]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).mul_(2).add_(0.5).to(dtype)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


# -- is it right ------------------------------------------------------------------------------------------------------

ROW_NORMS = {
    "layer": lambda x, w, b: ops.layer(x, w, b, EPS),
    "rms": lambda x, w, b: ops.rms(x, w, None, EPS),
    "scale": lambda x, w, b: ops.scale(x, w[:1], None, EPS),
    "group": lambda x, w, b: ops.group(x, w, b, EPS, 4),
}


def checks() -> Iterator[dict]:
    """Check every kernel against the reference in float64, and against itself bit for bit."""
    odd = [(7, 36)] if DRY else [(67, 516), (9, 8100)] if SMALL else [(4099, 516), (1031, 8100)]
    for n, c in odd if SMALL else [*SHAPES[:-1], *odd]:
        for dtype, kind in DTYPES.items():
            for name, found in results(n, c, kind):
                errors, again = found
                yield {"rows": n, "channels": c, "dtype": dtype, "op": name, "error": max(errors), "same_bits": again,
                       "ok": max(errors) < BOUND[dtype] and again}  # fmt: skip
    if not (DRY or SMALL):
        x = draw(270_000, 8192, dtype=torch.bfloat16)  # more than 2^31 numbers
        tail = ops.layer(x[-64:].double(), None, None, EPS)
        error = relative(kernels.row_norm(x, None, None, "layer", EPS)[0][-64:], tail)
        yield {"rows": 270_000, "channels": 8192, "dtype": "bf16", "op": "layer, last rows", "error": error,
               "same_bits": "", "ok": error < BOUND["bf16"]}  # fmt: skip


def sanitizer(seconds: int = 90) -> Iterator[dict]:
    """Run the checks at small odd shapes under compute-sanitizer, in a process each."""
    tool = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")
    if DRY or not tool:
        yield {"tool": "compute-sanitizer", "ok": "", "output": "not installed"}
        return
    small_checks()  # compiles the kernels, which takes far longer under the sanitizer
    for check in ("memcheck", "racecheck"):
        options = "--error-exitcode", "9", "--print-limit", "5"
        ended = small_checks("timeout", str(seconds), tool, "--tool", check, *options)
        lines = [line for line in ended.stdout.splitlines() if line.startswith("=========")]
        late, output = ended.returncode == 124, " ".join(lines[-6:])[:500]  # 124 is from `timeout`
        yield {"tool": check, "ok": "" if late else ended.returncode == 0, "output": "out of time" if late else output}


def small_checks(*under: str) -> subprocess.CompletedProcess:
    with tempfile.TemporaryDirectory() as out:
        command = ["env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1", *under, sys.executable, __file__, out]
        return subprocess.run([*command, "--small", "--only", "checks"], capture_output=True, text=True, check=False)


def results(n: int, c: int, dtype: torch.dtype) -> Iterator[tuple[str, tuple[list[float], bool]]]:
    x, dy = draw(n, c, dtype=dtype), draw(n, c, dtype=dtype)
    w, b = draw(c), draw(c)
    mask = torch.rand(n, device=DEVICE) > 0.2
    wide = [t.double() for t in (x, w, b)]
    for name, norm in ROW_NORMS.items():

        def both(choice, inputs, upstream, norm=norm):
            inputs = [t.detach().clone().requires_grad_() for t in inputs]
            with normkit.kernels(choice):
                y = norm(*inputs)
                grads = torch.autograd.grad(y, inputs, upstream, allow_unused=True)
            return [y.detach(), *(g for g in grads if g is not None)]

        got, again = both("triton", (x, w, b), dy), both("triton", (x, w, b), dy)
        expected = both("reference", wide, dy.double())
        yield name, compare(got, again, expected)
    for center in (False, True):
        mean, coefficients = draw(c) if center else None, draw(3, c)

        def column(of, x, dy, mean, coefficients, center=center):
            sums = of.gradient_sums(dy, x, mean, mask, True)
            scaled = of.standardize(x, coefficients[: 1 + center].abs(), *coefficients[:2], 1e-3)
            return [of.moments(x, mask, center)[0], scaled, of.gradient(dy, x, mean, coefficients, mask), sums]

        given = x, dy, mean, coefficients
        expected = column(reference, *(None if t is None else t.double() for t in given))
        yield f"batch statistics, center={center}", compare(column(kernels, *given), column(kernels, *given), expected)


def compare(got: list[Tensor], again: list[Tensor], expected: list[Tensor]) -> tuple[list[float], bool]:
    errors = [relative(g, e) for g, e in zip(got, expected, strict=True)]
    return errors, all(torch.equal(g, a) for g, a in zip(got, again, strict=True))


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


def speed(left: Callable[[], float]) -> Iterator[dict]:
    """Row norms and batch statistics, forward and backward, beside the ceiling."""
    for n, c in SHAPES:
        for dtype, kind in DTYPES.items():
            if left() < 0:
                return
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


def timed(n: int, c: int, kind: torch.dtype) -> tuple[dict[str, Run], dict[str, Run]]:
    """Runs of forward and backward at one shape, by name: "operation provider"."""
    x, dy = draw(n, c, dtype=kind).requires_grad_(), draw(n, c, dtype=kind)
    w, b = draw(c, dtype=kind).requires_grad_(), draw(c, dtype=kind).requires_grad_()
    forward: dict[str, Run] = {}
    backward: dict[str, Run] = {}
    for op in ("layer", "rms"):

        def ours(x, w, b, eps, op=op):
            return reference.RowNorm.apply(x, w, b if op == "layer" else None, op, eps, 1, kernels)

        for who, norm in {"ours": ours, **providers(op, compiled=not DRY)}.items():
            run = functools.partial(norm, x, w, b, EPS)
            try:  # a peer may refuse a shape, a type or this version of torch
                y = run()
                forward[f"{op} {who}"] = run
                if not isinstance(y, Tensor) or y.grad_fn is None:
                    continue  # it has a forward alone
                inputs = [x, w, b] if op == "layer" else [x, w]
                back = functools.partial(torch.autograd.grad, y, inputs, dy, retain_graph=True)
                back()
            except Exception as error:
                print(f"{op} {who} ({n}, {c}) {kind}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            backward[f"{op} {who}"] = back
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


EARLY = " in its warm-up"
STEPS = ("layer", "rms", "batch", "power", "power(groups=0)", "un", "un" + EARLY)
SIZES = {
    "tiny": ({"width": 16, "hidden": 32, "depth": 1, "heads": 2}, (2, 5)),
    "iwslt14": ({"width": 512, "hidden": 1024, "depth": 6, "heads": 4}, (128, 32)),
    "multi30k": ({"width": 192, "hidden": 768, "depth": 3, "heads": 4}, (64, 16)),
}


def steps() -> Iterator[dict]:
    """Time training steps of two models; norms are past their warm-up."""
    sizes = [("tiny", "bf16")] if DRY else [("iwslt14", "bf16"), ("multi30k", "fp32")]
    for size, precision in sizes:
        of_one = functools.partial(training_step, size, precision)
        runs = {spec: of_one(spec, "auto") for spec in STEPS}
        runs |= {f"{spec}, reference": of_one(spec, "reference") for spec in ("layer", "un")}
        timings = clock(runs)
        for name in runs:
            yield {"model": size, "precision": precision, "norm": name, **compared(timings, name, "layer")}


def training_step(size: str, precision: str, spec: str, choice: str) -> Run:
    """Forward, backward and optimizer of one model on a batch of random words."""
    plain = spec.removesuffix(EARLY)
    torch.manual_seed(0)
    sizes, batch = SIZES[size]
    source, target = (torch.randint(4, 10_000, batch, device=DEVICE) for _ in range(2))
    model = Seq2Seq(Model(norm=plain, share=True, **sizes), 10_000, 10_000)
    model.to(DEVICE).train()
    norms = [module for module in model.modules() if isinstance(module, normkit.Norm)]
    for norm in norms:
        if EARLY not in spec:
            skip_warmup(norm)
        else:
            norm.lag.fill_(math.nan)  # never below the limit: the warm-up lasts
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=not DRY)

    def step() -> None:
        with normkit.kernels(choice):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=precision == "bf16"):
                logits = model(source, target)
                loss = F.cross_entropy(logits.flatten(0, -2).float(), target.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


# -- the whole --------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--budget", type=float, default=500.0, help="seconds; sections not begun by then are left out")
    parser.add_argument("--only", nargs="+", default=["checks", "sanitizer", "launches", "steps", "speed"])
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--small", action="store_true", help="the checks at small odd shapes alone")
    given = parser.parse_args()
    if not DRY and not torch.cuda.is_available():
        return print("no CUDA device; --dry tries the script itself on a CPU", file=sys.stderr) or 2
    begun, failures = time.monotonic(), {}
    given.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    left = lambda: given.budget * 0.8 - (time.monotonic() - begun)  # noqa: E731
    sections = {"checks": checks, "sanitizer": sanitizer, "launches": launches, "steps": steps,
                "speed": lambda: speed(left)}  # fmt: skip
    for name in given.only:
        if time.monotonic() - begun > given.budget:
            failures[name] = "not begun: the budget was spent"
            continue
        found: list[dict] = []
        try:
            for row in sections[name]():
                found.append(row)
                if time.monotonic() - begun > given.budget:
                    failures[name] = f"cut after {len(found)} rows: the budget was spent"
                    break
        except Exception:
            failures[name] = traceback.format_exc(limit=6)
        if found:
            short = [{k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()} for row in found]
            text = io.StringIO()
            writer = csv.DictWriter(text, list(found[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(short)
            write_whole(given.out / f"{name}.csv", text.getvalue().encode())
        wrong = [row for row in found if row.get("ok") is False]
        print(f"{name}: {len(found)} rows, {len(wrong)} wrong, {time.monotonic() - begun:.0f} s so far", flush=True)
        for row in wrong:
            print("  WRONG", row, flush=True)
    import triton

    machine = {
        "device": "dry" if DRY else torch.cuda.get_device_name(), "torch": torch.__version__,
        "triton": triton.__version__, "python": sys.version.split()[0], "dry": DRY, "peers": versions(),
        "copy_bytes_per_s": 0 if SMALL else ceiling(), "seconds": round(time.monotonic() - begun),
    }  # fmt: skip
    for name, content in (("machine", machine), ("failures", failures)):
        write_whole(given.out / f"{name}.json", f"{json.dumps(content, indent=1)}\n".encode())
    print(json.dumps(machine), *(f"\nFAILED {name}: {text}" for name, text in failures.items()))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
