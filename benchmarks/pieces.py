"""Time of the bare calls that a norm consists of, relative to LayerNorm's, on a CPU.

    python benchmarks/pieces.py [--threads 1] [--rounds 60] [--shapes 4096x512 ...] [--dtypes float32] [--no-inductor]

For each norm, forward and backward, without module, autograd and checks: the C++ kernels, and the fewest ATen calls
that compute it. `benchmarks/ops.py` cannot fall below these times. For comparison: PyTorch's own batch normalization,
two norms compiled by Inductor, and copies of 5 and of 8 activations, the physical limits. `moves` are activations that
the calls read and write if only a row (for the C++ kernels a block of rows) stays in the cache. Writes
benchmarks/results/pieces_cpu.csv. Needs a C++ compiler.
"""

import platform
from collections.abc import Callable

import sweep
import torch
from normkit_papers.timing import measure as time_by_turns
from torch import Tensor

from normkit.kernels import fused
from normkit.kernels.cpu import entry as native
from normkit.kernels.cpu.arguments import call

EPS = 1e-5
FIELDS = ("device", "threads", "torch", "pass", "norm", "how", "moves", "target", "shape", "dtype", "rounds", "ms",
          "low", "ratio", "high", "noise")  # fmt: skip
Run = tuple[str, str, str, int, str, Callable[[], object]]  # pass, norm, how, moves, target, the calls
aten = torch.ops.aten


def power_forward(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return (x * a + b).to(x.dtype), x.float().square().mean(0)


def power_backward(dy: Tensor, x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dy, wide = dy.float(), x.float()
    return (dy * a - wide * b).to(x.dtype), dy.sum(0), (dy * wide).sum(0)


def rms_forward(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return (wide * r * w).to(x.dtype), r


def rms_backward(dy: Tensor, x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    dy, wide = dy.float(), x.float()
    g = dy * w
    dx = r * (g - wide * r.square() * (g * wide).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dy * wide * r).sum(0)


def runs(n: int, c: int, kind: torch.dtype, *, inductor: bool) -> list[Run]:
    """Runs at one shape and type."""
    torch.manual_seed(0)
    x, dy = torch.randn(2, n, c).to(kind)
    w, b, a, inv = torch.rand(4, c) + 0.5
    pair = torch.stack([a, a])  # a mean and a variance
    own, r = [w.to(kind), b.to(kind)], torch.rand(n, 1) + 0.5
    place, zero, length = torch.empty_like(x), torch.zeros(n, 1), 1 / r
    _, mean, rstd = torch.native_layer_norm(x, (c,), *own, EPS)
    sums, everything = [False, True, True], [True, True, True]

    def layer() -> None:
        torch.native_layer_norm(x, (c,), *own, EPS)
        aten.native_layer_norm_backward(dy, x, (c,), mean, rstd, *own, everything)

    def batch_torch() -> None:
        torch.native_batch_norm(x, w, b, None, None, True, 0.0, EPS)
        aten.native_batch_norm_backward(dy, x, w, None, None, a, inv, True, EPS, everything)

    def batch() -> None:
        fused.moments(x, None, True, torch.float32)
        fused.normalize(x, a, a, w, b, EPS)
        aten.native_batch_norm_backward(dy, x, w, None, None, a, inv, True, EPS, everything)

    def columns() -> None:
        fused.moments(x, None, True, torch.float32)
        fused.normalize(x, None, a, w, b, EPS)
        aten.native_batch_norm_backward(dy, x, w, None, None, a, inv, True, EPS, sums)
        dx = fused.normalize(x, None, a, w, b, EPS)
        if kind is torch.float32:
            dx.addcmul_(dy, w)
        else:
            fused.normalize(dy, None, a, w, None, 0.0).add_(dx)

    def divided() -> None:  # ScaleNorm; PowerNorm's layer-scale
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        x * r if kind is torch.float32 else fused.scale_rows(x, r)
        aten._weight_norm_interface_backward(dy.float(), x.float(), r, length, 0)[0].to(kind)

    def rms() -> None:
        torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        (x * r).mul_(w).to(kind)
        up = dy.float()
        dx = aten.native_layer_norm_backward(up, x.float(), (c,), zero, r, w, None, [True, True, False])[0]
        dx.add_(r * up.mv(w)[:, None]).to(kind)

    zeros = torch.zeros(c)

    def ours(*, center: bool = False, one_pass: bool = False, groups: int = 0) -> None:
        stat = pair if center else pair[1:]
        if one_pass:
            call("column_forward", x=x, y=torch.empty_like(x), scale=w, shift=b, stat=torch.empty(1, c),
                 count=torch.empty(()), **sizes, groups=groups)  # fmt: skip
            native.standardize_grad(dy, x, stat, EPS, center, w, removed=stat, groups=groups)
        else:
            native.moments(x, None, center)
            native.standardize(x, stat, EPS, center, w, b)
            native.standardize_grad(dy, x, stat, EPS, center)
            native.standardize_grad(dy, x, stat, EPS, center, w, removed=stat, sums=False)

    sizes = {"n": n, "channels": c, "eps": EPS}

    def ours_rows(*, length: bool) -> None:
        call("row_forward", x=x, y=torch.empty_like(x), weight=w, bias=None, **sizes, length=length)
        found = torch.empty_like(x), torch.empty(2, c)
        call("row_backward", dy=dy, x=x, dx=found[0], weight=w, sums=found[1], **sizes, length=length)

    def copies(times: int) -> Callable[[], None]:  # of 2 moves each
        return lambda: [place.copy_(x) for _ in range(times)] and None

    half = x[: n // 2]
    wide = kind is torch.float32
    found: list[Run] = [
        ("train", "layer", "calls", 5, "1.0", layer),
        ("train", "any: 5 activations", "copy", 5, "", lambda: (copies(2)(), place[: n // 2].copy_(half))),
        ("train", "any: 8 activations", "copy", 8, "", copies(4)),
        ("train", "rms", "C++", 5, "1.0", lambda: ours_rows(length=False)),
        ("train", "scale", "C++", 5, "1.0", lambda: ours_rows(length=True)),
        ("train", "power(groups=0)", "C++", 5, "1.0", lambda: ours(one_pass=True)),
        ("train", "power", "C++", 5, "1.0", lambda: ours(one_pass=True, groups=1)),
        ("train", "pnv, un, mabn", "C++", 8, "pnv 1.2; un, mabn 1.5", ours),
        ("train", "batch, renorm", "C++", 8, "1.2; renorm 1.5", lambda: ours(center=True)),
        ("train", "batch", "PyTorch's own", 9, "1.2", batch_torch),
        ("train", "batch, renorm", "calls", 9, "1.2; renorm 1.5", batch),
        ("train", "power(groups=0), pnv, un, mabn", "calls", 11 if wide else 13, "1.0; pnv 1.2; un, mabn 1.5", columns),
        ("train", "scale", "calls", 6 if wide else 18, "1.0", divided),
        ("train", "power", "calls", 17 if wide else 31, "1.0", lambda: (divided(), columns())),
        ("train", "rms", "calls", 11 if wide else 32, "1.0", rms),
    ]
    if inductor:
        done = [torch.compile(f) for f in (power_forward, power_backward, rms_forward, rms_backward)]
        found += [
            ("train", "power(groups=0)", "Inductor", 5, "1.0", lambda: (done[0](x, a, b), done[1](dy, x, a, b))),
            ("train", "rms", "Inductor", 5, "1.0", lambda: (done[2](x, w), done[3](dy, x, w, r))),
        ]
    return [
        *found,
        ("inference", "layer", "calls", 2, "", lambda: torch.native_layer_norm(x, (c,), *own, EPS)),
        ("inference", "any: 2 activations", "copy", 2, "", copies(1)),
        ("inference", "batch, renorm, power(groups=0), pnv, un, mabn", "C++", 2, "0.8",
         lambda: native.multiply_add(x, w, zeros)),
        ("inference", "batch, renorm, power(groups=0), pnv, un, mabn", "calls", 2, "0.8",
         lambda: fused.normalize(x, None, a, w, b, 0.0)),
    ]  # fmt: skip


def measure(shape: str, dtype: str, rounds: int, *, inductor: bool) -> list[dict]:
    """Rows of the table for one shape and type."""
    n, c = map(int, shape.split("x"))
    table = []
    with torch.no_grad():
        every = {run[:3]: run for run in runs(n, c, getattr(torch, dtype), inductor=inductor)}
        runs_by_name = {" | ".join(key): run[5] for key, run in every.items()}
        timings = time_by_turns(runs_by_name, rounds, threads=torch.get_num_threads())
    for key, (mode, norm, how, moves, target, _) in every.items():
        found = timings.ratio(" | ".join(key), f"{mode} | layer | calls")
        table.append({
            "device": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__, "pass": mode,
            "norm": norm, "how": how, "moves": moves, "target": target, "shape": shape, "dtype": dtype,
            "rounds": rounds, "ms": round(1e3 * timings.median(" | ".join(key)), 3),
            "low": round(found.low, 2), "ratio": round(found.median, 2), "high": round(found.high, 2),
            "noise": round(timings.noise, 3),
        })  # fmt: skip
        print("  ".join(f"{table[-1][f]!s:>12s}" for f in FIELDS[3:]), flush=True)
    return table


def main() -> None:
    """Measure and write."""
    parser = sweep.parser(__doc__, "pieces_cpu.csv")
    parser.add_argument("--no-inductor", action="store_true")
    args = parser.parse_args()
    sweep.begin(args.threads)
    table = [row for shape in args.shapes for dtype in args.dtypes
             for row in measure(shape, dtype, args.rounds, inductor=not args.no_inductor)]  # fmt: skip
    sweep.keep(args.out, FIELDS, table)


if __name__ == "__main__":
    main()
