"""Time of a compiled pre-norm block on a CPU, forward and backward, relative to LayerNorm.

The block is norm, Linear, GELU, Linear, add.

    python benchmarks/blocks.py [--threads 1] [--rounds 60] [--shapes 4096x512] [--dtypes float32] [--out FILE]

Every block is compiled by Inductor (it needs a C++ compiler) and takes turns with the others, as in ops.py. The target
is 1.05 of the block with LayerNorm compiled.
"""

import platform

import sweep
import torch
from normkit_papers.norm_speed import skip_warmup, training
from normkit_papers.timing import measure as time_by_turns
from torch import Tensor, nn

import normkit

NORMS = ("layer", "rms", "scale", "power(groups=0)", "power", "pnv", "batch", "un", "mabn", "renorm")
FIELDS = ("device", "threads", "torch", "norm", "shape", "dtype", "rounds", "ms", "low", "ratio", "high", "noise")


class Block(nn.Module):
    """`x + Linear(GELU(Linear(norm(x))))`, four times as wide inside."""

    def __init__(self, norm: nn.Module, dim: int):
        super().__init__()
        self.norm = norm
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        return x + self.mlp(self.norm(x))


def measure(shape: str, kind: str, rounds: int) -> list[dict]:
    """Rows of the table for one shape and type."""
    n, dim = map(int, shape.split("x"))
    dtype = getattr(torch, kind)
    torch.manual_seed(0)
    x, dy = torch.randn(n, dim).to(dtype), torch.randn(n, dim).to(dtype)
    runs = {}
    for spec in ("nn.LayerNorm", *NORMS):
        norm = nn.LayerNorm(dim) if spec == "nn.LayerNorm" else skip_warmup(normkit.make(spec, dim))
        runs[spec] = training(torch.compile(Block(norm, dim).to(dtype)), x, dy)
    timings = time_by_turns(runs, rounds, threads=torch.get_num_threads())
    table = []
    for spec in runs:
        found = timings.ratio(spec, "nn.LayerNorm")
        table.append({
            "device": platform.machine(), "threads": torch.get_num_threads(), "torch": torch.__version__, "norm": spec,
            "shape": shape, "dtype": kind, "rounds": rounds, "ms": round(1e3 * timings.median(spec), 2),
            "low": round(found.low, 3), "ratio": round(found.median, 3), "high": round(found.high, 3),
            "noise": round(timings.noise, 3),
        })  # fmt: skip
        print("  ".join(f"{table[-1][f]!s:>12s}" for f in FIELDS[3:]), flush=True)
    return table


def main() -> None:
    """Measure and write."""
    args = sweep.parser(__doc__, "blocks_cpu.csv", ("4096x512",), ("float32",)).parse_args()
    sweep.begin(args.threads)
    rows = [row for shape in args.shapes for kind in args.dtypes for row in measure(shape, kind, args.rounds)]
    sweep.keep(args.out, FIELDS, rows)


if __name__ == "__main__":
    main()
