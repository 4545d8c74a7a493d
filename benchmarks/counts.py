"""What a norm asks of PyTorch: ATen operations and bytes moved, training forward and backward, on a CPU. No clock.

    python benchmarks/counts.py      # writes benchmarks/results/counts.csv; a test makes it anew and compares

x is float32 [1024, 64]. An operation counts when it computes: views and allocations do not. Bytes are those of its
tensor arguments and results, so `moves` (bytes / bytes of x) is what eager mode reads and writes if no cache helps.
"""

import csv
import io
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

import normkit
from normkit.norms.measure import settle
from normkit.ops.clock import Counter

RESULT = Path(__file__).parent / "results" / "counts.csv"
SPECS = (*normkit.NORMS, "power(groups=0)")


def count(norm: nn.Module, rows: int = 1024, channels: int = 64) -> list[tuple[str, int, float]]:
    """(pass, operations, moves) of forward and backward of a norm that has trained a step."""
    torch.manual_seed(0)
    x, dy = torch.randn(rows, channels, requires_grad=True), torch.randn(rows, channels)
    norm(x).backward(dy)
    x.grad = None
    norm.zero_grad()
    with Counter() as forward:
        y = norm(x)
    with Counter() as backward:
        y.backward(dy)
    passes = (("forward", forward), ("backward", backward))
    return [(name, each.operations, round(each.bytes / (4 * x.numel()), 1)) for name, each in passes]


def table() -> Iterator[tuple[str, str, int, float]]:
    """Rows of the file: torch's LayerNorm first, then every norm of the table."""
    for spec in ("nn.LayerNorm", *SPECS):
        norm = nn.LayerNorm(64) if spec == "nn.LayerNorm" else settle(normkit.make(spec, 64))
        for row in count(norm.train()):
            yield spec, *row


def text() -> str:
    """The file as it should be."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("norm", "pass", "operations", "moves"))
    writer.writerows(table())
    return out.getvalue()


if __name__ == "__main__":
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(text())
    print(text(), end="")
