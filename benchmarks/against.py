"""Time of a training step in this tree, relative to another checkout of normkit.

    git worktree add ../old b3d1ea9
    python benchmarks/against.py ../old [NORM ...] [--rounds 300]

The model is a Transformer of 6 blocks with 64 channels, which reads 16 x 32 tokens: time in Python counts. Each tree
trains in a process of its own, and the other one in two. They take turns step by step on one core, in random order,
and a ratio is taken within a round. `noise` is the ratio of the two equal processes.
"""

import argparse
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rows import QUIET, commit, keep, processor

NORMS = ("un", "power(groups=0)", "rms", "batch", "pnv", "scale")
HERE = Path(__file__).resolve().parent.parent
FIELDS = ("device", "norm", "base", "commit", "rounds", "ms", "low", "ratio", "high", "noise")


def serve(spec: str) -> None:
    """Train one step for each further line of the standard input, and print its seconds."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    import normkit

    try:
        from normkit.bench import skip_warmup
    except ImportError:  # before the split into two distributions
        from normkit.lab.norm_speed import skip_warmup  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0, activation="gelu", batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Embedding(100, 64), nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(64, 100)
    )
    model = normkit.convert(model, spec)
    for module in model.modules():
        if isinstance(module, normkit.Norm):
            skip_warmup(module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids, wanted = torch.randint(100, (2, 16, 32))

    def step() -> None:
        F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(40):
        step()
    sys.stdin.readline()
    print(normkit.__file__, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


def started(tree: Path, spec: str) -> subprocess.Popen[str]:
    """Return a process that trains with the normkit of a tree."""
    return subprocess.Popen(
        ["taskset", "-c", "0", sys.executable, __file__, "--serve", spec],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        env={**os.environ, **QUIET, "PYTHONPATH": str(tree.resolve())},
    )  # fmt: skip


def answer(server: Any) -> str:
    """Ask for one step; the first answer is the file that was imported."""
    print(file=server.stdin)
    return server.stdout.readline().strip()


def compare(spec: str, other: Path, rounds: int) -> dict[str, object]:
    """Return the row of a norm."""
    trees = (HERE, other, other)
    servers = [started(tree, spec) for tree in trees]
    try:
        for server, tree in zip(servers, trees, strict=True):
            loaded = answer(server)
            if not loaded.startswith(str(tree.resolve())):
                raise SystemExit(f"the process for {tree} loaded {loaded or 'nothing'}")
        found = []
        for _ in range(rounds):
            seconds = {turn: float(answer(servers[turn])) for turn in random.sample(range(3), 3)}
            found.append([seconds[turn] for turn in range(3)])
    finally:
        for server in servers:
            server.kill()
    tenths = statistics.quantiles([new / old for new, old, _ in found], n=10)
    return {
        "norm": spec, "rounds": rounds, "ms": round(1e3 * statistics.median(new for new, _, _ in found), 2),
        "low": round(tenths[0], 3), "ratio": round(tenths[4], 3), "high": round(tenths[-1], 3),
        "noise": round(statistics.median(again / old for _, old, again in found), 3),
    }  # fmt: skip


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("norms", nargs="*", default=NORMS)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/steps_against.csv"))
    args = parser.parse_args()
    base = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=args.other, capture_output=True, text=True, check=True
    ).stdout.strip()
    for spec in args.norms:
        about = {"device": processor(), "base": base, "commit": commit()}
        row = {**about, **compare(spec, args.other, args.rounds)}
        print("  ".join(f"{row[field]!s:>16s}" for field in FIELDS[1:]), flush=True)
        keep(args.out, FIELDS, ("device", "norm", "base"), [row])


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["--serve"] else main()
