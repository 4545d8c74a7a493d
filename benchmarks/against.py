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

NORMS = ("un", "power(groups=0)", "rms", "batch", "pnv", "scale")
HERE = Path(__file__).resolve().parent.parent
FIELDS = ("device", "norm", "base", "commit", "rounds", "ms", "low", "ratio", "high", "noise")


def serve(spec: str) -> None:
    """Train one step for each line of the standard input, and print its seconds."""
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
    print(normkit.__file__, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        step()
        print(time.perf_counter() - start, flush=True)


def compare(spec: str, other: Path, rounds: int) -> dict[str, object]:
    """Return the row of a norm."""
    quiet = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "MALLOC_MMAP_THRESHOLD_": "2147483647",
        "MALLOC_TRIM_THRESHOLD_": "17179869184",
    }
    command = ["taskset", "-c", "0", sys.executable, __file__, "--serve", spec]
    servers = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **quiet, "PYTHONPATH": str(tree.resolve())},
        )
        for tree in (HERE, other, other)
    ]  # fmt: skip

    def ask(server: subprocess.Popen[str]) -> float:
        assert server.stdin is not None
        assert server.stdout is not None
        print(file=server.stdin, flush=True)
        return float(server.stdout.readline())

    try:
        for server, tree in zip(servers, (HERE, other, other), strict=True):
            assert server.stdout is not None
            loaded = server.stdout.readline().strip()
            if not loaded.startswith(str(tree.resolve())):
                raise SystemExit(f"the process for {tree} loaded {loaded or 'nothing'}")
        found: list[tuple[float, float, float]] = []
        for _ in range(rounds):
            turns = random.sample(range(3), 3)
            seconds = {turn: ask(servers[turn]) for turn in turns}
            found.append((seconds[0], seconds[1], seconds[2]))
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
    import rows

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
        row = {
            "device": rows.processor(),
            "base": base,
            "commit": rows.commit(),
            **compare(spec, args.other, args.rounds),
        }
        print("  ".join(f"{row[field]!s:>16s}" for field in FIELDS[1:]), flush=True)
        rows.keep(args.out, FIELDS, ("device", "norm", "base"), [row])


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["--serve"] else main()
