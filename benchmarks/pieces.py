"""Would Inductor do better than PyTorch's fused kernels put to other uses? Passes of norms on a CPU, one thread.

    python benchmarks/pieces.py [--rounds 30]      # writes benchmarks/results/pieces_cpu.csv; needs a C++ compiler

[4096, 512] in float32. Each pass as `ops/fused.py` does it and compiled by itself, over the same pass of LayerNorm, by
turns. CPU time of the process, the least of all rounds: what other processes do counts for little.
"""

import argparse
import csv
import time
from pathlib import Path

import torch
from torch import Tensor

from normkit.ops import channels, fused, rows

ROWS, C, EPS = 4096, 512, 1e-5


def power_forward(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return x * a + b, x.square().mean(0)


def power_backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return dy * a - x * b, dy.sum(0), (dy * x).sum(0)


def rms_forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    return x * r * w, r


def rms_backward(dy: Tensor, x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    g = dy * w
    return r * (g - x * r.square() * (g * x).mean(-1, keepdim=True)), (dy * x * r).sum(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pieces_cpu.csv")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, dy = torch.randn(2, ROWS, C)
    w, a, b = torch.rand(3, C) + 0.5
    _, mean, inv = torch.native_layer_norm(x, (C,), w, b, EPS)
    r = rms_forward(x, w)[1]
    leaf, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = rows.rms(leaf, weight, None, EPS)
    stat = a[None]
    compiled = {f.__name__: torch.compile(f) for f in (power_forward, power_backward, rms_forward, rms_backward)}
    runs = {
        ("layer", "forward", "torch"): lambda: torch.native_layer_norm(x, (C,), w, b, EPS),
        ("layer", "backward", "torch"): lambda: torch.ops.aten.native_layer_norm_backward(
            dy, x, (C,), mean, inv, w, b, [True, True, True]
        ),
        ("power", "forward", "fused"): lambda: (
            fused.column_moments(x, torch.float32), fused.standardize(x, None, a, w, b, EPS),
        ),
        ("power", "forward", "inductor"): lambda: compiled["power_forward"](x, a, b),
        ("power", "backward", "fused"): lambda: (
            channels.standardize_grad(dy, x, stat, EPS, False),
            channels.standardize_grad(dy, x, stat, EPS, False, w, removed=stat, sums=False),
        ),
        ("power", "backward", "inductor"): lambda: compiled["power_backward"](dy, x, a, b),
        ("rms", "forward", "fused"): lambda: rows.rms(leaf, weight, None, EPS),
        ("rms", "forward", "inductor"): lambda: compiled["rms_forward"](x, w),
        ("rms", "backward", "fused"): lambda: torch.autograd.grad(y, (leaf, weight), dy, retain_graph=True),
        ("rms", "backward", "inductor"): lambda: compiled["rms_backward"](dy, x, w, r),
    }  # fmt: skip
    least = dict.fromkeys(runs, float("inf"))
    for turn in range(args.rounds + 2):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn >= 2:
                least[name] = min(least[name], time.process_time() - start)
    half = args.out.with_suffix(".part")
    with half.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("norm", "pass", "how", "torch", "rounds", "ms", "ratio"))
        for (norm, side, how), seconds in least.items():
            ratio = seconds / least["layer", side, "torch"]
            row = (norm, side, how, torch.__version__, args.rounds, round(1e3 * seconds, 3), round(ratio, 2))
            writer.writerow(row)
            print(*row)
    half.replace(args.out)


if __name__ == "__main__":
    main()
