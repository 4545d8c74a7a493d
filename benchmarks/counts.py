"""Operations, bytes, FLOPs and launches of each norm in training.

    python benchmarks/counts.py           # writes benchmarks/results/counts.csv
    python benchmarks/counts.py --check   # counts again and shows what differs; a test runs this

x is float32 [1024, 64], without and with a mask that leaves out a quarter of the rows. Operations, bytes and FLOPs are
those of eager mode on a CPU: ATen's and our C++ kernels (it needs a C++ compiler); `fused_operations` and
`fused_moves` where there is no compiler, through PyTorch's own kernels. An operation counts when it computes: views
and allocations do not. Bytes are those of its tensor arguments and results, so `moves` (bytes / bytes of x) is what it
reads and writes if no cache helps; `flops` are per element of x. `launches` are those of a GPU: our kernels, counted
under Triton's interpreter, and the operations around them, at least one launch each.
"""

import argparse
import csv
import difflib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import triton_driver
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

import normkit
from normkit.lab.norm_speed import skip_warmup
from normkit.lab.op_counter import Counter
from normkit.norms import StatNorm

RESULT = Path(__file__).parent / "results" / "counts.csv"
FIELDS = ("norm", "mask", "pass", "operations", "moves", "flops", "fused_operations", "fused_moves", "launches")
SPECS = (*normkit.NORMS, "power(groups=0)")


class Launches(Counter):
    """Count our kernels and the operations around them, not the interpreter's own."""

    def __enter__(self):
        self.call = GridExecutor.__call__

        def launch(grid, *args, **kwargs):
            self.operations += 1
            with _disable_current_modes():
                return self.call(grid, *args, **kwargs)

        GridExecutor.__call__ = launch
        return super().__enter__()

    def __exit__(self, *raised):
        GridExecutor.__call__ = self.call
        return super().__exit__(*raised)


def passes(norm: nn.Module, x: Tensor, mask: Tensor | None, counter: type[Counter]) -> tuple[Counter, Counter]:
    """Count forward and backward of a norm that has trained a step."""
    dy, given = torch.randn_like(x), () if mask is None else (mask,)
    norm(x, *given).backward(dy)
    x.grad = None
    norm.zero_grad()
    with counter() as forward:
        y = norm(x, *given)
    with counter() as backward:
        y.backward(dy)
    x.grad = None
    return forward, backward


def table() -> Iterator[tuple]:
    """Rows of the file: torch's LayerNorm, then every norm."""
    triton_driver.install()
    torch.manual_seed(0)
    x, small = (torch.randn(rows, 64, requires_grad=True) for rows in (1024, 8))
    for spec in ("nn.LayerNorm", *SPECS):
        norm = nn.LayerNorm(64) if spec == "nn.LayerNorm" else skip_warmup(normkit.make(spec, 64))
        for masked in (False, True) if isinstance(norm, StatNorm) else (False,):
            masks = [torch.arange(len(t)) % 4 > 0 if masked else None for t in (x, small)]
            counted = []
            for choice, given, mask, counter in (
                ("native", x, masks[0], Counter), ("fused", x, masks[0], Counter), ("triton", small, masks[1], Launches)
            ):  # fmt: skip
                with normkit.kernels(choice):
                    counted.append(passes(norm.train(), given, mask, counter))
            for name, ours, fused, gpu in zip(("forward", "backward"), *counted, strict=True):
                yield (spec, "masked" if masked else "", name, ours.operations, round(ours.bytes / x.nbytes, 1),
                       round(ours.flops / x.numel(), 1), fused.operations, round(fused.bytes / x.nbytes, 1),
                       gpu.operations)  # fmt: skip


def text() -> str:
    """Content of the file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FIELDS)
    writer.writerows(table())
    return out.getvalue()


def main() -> int:
    """Write the file, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given, made = parser.parse_args(), text()
    if not given.check:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(made)
        return print(made, end="") or 0
    differ = list(difflib.unified_diff(RESULT.read_text().splitlines(), made.splitlines(), "counts.csv", "now", n=0))
    print("\n".join(differ))
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
