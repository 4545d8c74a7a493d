"""Norms alone on a CPU, training forward and backward: ratio to `nn.LayerNorm` in one run, share of the copy ceiling.

    python benchmarks/ops.py [--threads 2] [--rounds 30] [--shapes 4096x512 ...] [--dtypes float32 ...] [--out FILE]

Everything takes turns, round by round, so that a busy machine slows all of them; a ratio is taken within a round, and
its median over rounds is given with the 20th and 80th percentile. Between two timings a buffer larger than the caches
is written. `ceiling` is how fast the machine copies: the time of copying the bytes that the norm cannot avoid moving
(5 activations for a norm of rows, 8 where the statistics of the batch come first), over the time taken.
Run it on a quiet machine, with the settings of the Makefile (OMP_WAIT_POLICY, MALLOC_*).
"""

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import normkit

SHAPES = ("4096x512", "8192x768", "32768x384")
TARGETS = {  # of the ratio to nn.LayerNorm
    "layer": 1.0, "rms": 1.0, "scale": 1.0, "power(groups=0)": 1.0, "power": 1.0, "pnv": 1.2, "batch": 1.2,
    "un": 1.5, "mabn": 1.5, "renorm": 1.5,
}  # fmt: skip
TWO_PASS = ("pnv", "batch", "un", "mabn", "renorm")
INFERENCE = 0.8  # target of an unfolded norm with frozen statistics
FIELDS = ("device", "threads", "torch", "provider", "norm", "pass", "shape", "dtype", "rounds", "ms", "low", "ratio",
          "high", "target", "ceiling")  # fmt: skip


def providers(spec: str, dim: int) -> dict[str, nn.Module]:
    """Who else computes this norm: PyTorch's own, and peers where they are installed and run on a CPU."""
    found: dict[str, nn.Module] = {"normkit": normkit.make(spec, dim)}
    if spec == "rms":
        found["torch"] = nn.RMSNorm(dim, eps=1e-5)
    if spec == "batch":
        found["torch"] = nn.BatchNorm1d(dim)
    return found


def training(norm: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], object]:
    """One forward and backward; gradients of parameters are dropped, not added up."""
    x = x.clone().requires_grad_()
    inputs = [x, *norm.parameters()]
    return lambda: torch.autograd.grad(norm(x), inputs, dy)


def inference(norm: nn.Module, x: Tensor) -> Callable[[], object]:
    """One forward in evaluation mode."""
    norm.eval()

    def run() -> Tensor:
        with torch.no_grad():
            return norm(x)

    return run


def rounds_of(runs: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
    """Seconds of every run in every round, caches flushed before each."""
    trash = torch.zeros(16 << 20)  # 64 MiB
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 2):
        for name, run in runs.items():
            trash.add_(1)
            start = time.perf_counter()
            run()
            if turn >= 2:
                taken[name].append(time.perf_counter() - start)
    return taken


def measure(shape: str, kind: str, rounds: int) -> list[dict]:
    """Rows of the table for one shape and type."""
    n, dim = map(int, shape.split("x"))
    dtype = getattr(torch, kind)
    torch.manual_seed(0)
    x, dy = torch.randn(n, dim).to(dtype), torch.randn(n, dim).to(dtype)
    place = torch.empty_like(x)
    table = []
    for mode in ("train", "inference"):
        layer = nn.LayerNorm(dim, dtype=dtype)
        runs: dict[str, Callable] = {
            "torch nn.LayerNorm": training(layer, x, dy) if mode == "train" else inference(layer, x)
        }
        runs["copy"] = lambda: place.copy_(x)
        for spec in TARGETS:
            for provider, built in providers(spec, dim).items():
                norm = built.to(dtype)
                if mode == "train":
                    runs[f"{provider} {spec}"] = training(norm, x, dy)
                elif getattr(norm, "offline", False):
                    runs[f"{provider} {spec}"] = inference(norm, x)
        taken = rounds_of(runs, rounds)
        base, copy = taken["torch nn.LayerNorm"], statistics.median(taken.pop("copy"))
        for name, seconds in taken.items():
            provider, spec = name.split(" ", 1)
            ratios = statistics.quantiles([a / b for a, b in zip(seconds, base, strict=True)], n=10)
            moves = 2 if mode == "inference" else 8 if spec in TWO_PASS else 5
            target = "" if provider == "torch" else TARGETS[spec] if mode == "train" else INFERENCE
            ms = statistics.median(seconds)
            table.append({
                "device": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__,
                "provider": provider, "norm": spec, "pass": mode, "shape": shape, "dtype": kind, "rounds": rounds,
                "ms": round(1e3 * ms, 3), "low": round(ratios[1], 2), "ratio": round(ratios[4], 2),
                "high": round(ratios[7], 2), "target": target, "ceiling": round(moves / 2 * copy / ms, 2),
            })  # fmt: skip
            print("  ".join(f"{table[-1][f]!s:>10s}" for f in FIELDS[3:]), flush=True)
    return table


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ops_cpu.csv")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for shape in args.shapes for kind in args.dtypes for row in measure(shape, kind, args.rounds)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    half = args.out.with_suffix(".part")
    with half.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    half.replace(args.out)


if __name__ == "__main__":
    main()
