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
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
import triton_driver
from normkit_papers.norm_speed import skip_warmup
from normkit_papers.op_counter import FREE, Counter
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

import normkit
from normkit.norms import StatNorm

RESULT = Path(__file__).parent / "results" / "counts.csv"
FIELDS = ("norm", "mask", "pass", "operations", "moves", "flops", "fused_operations", "fused_moves", "launches")
SPECS = (*normkit.NORMS, "power(groups=0)")
MOVERS = {"copy_", "_to_copy", "clone", "cat", "stack", "fill_", "zero_", "arange", "index_select", "index"}
FLOPS = {  # per element of x: additions, multiplications, comparisons and roots, one each; 1 for all others
    "native_layer_norm": 8,  # mean 1, variance 3, standardize 2, weight and bias 2
    "native_layer_norm_backward": 13,  # z 2, weight 1, two sums 3, dx 4, weight's and bias's gradients 3
    "batch_norm_update_stats": 4,  # mean 1, variance 3
    "native_batch_norm": 2,  # inference: x * a + b
    "native_batch_norm_backward": 9,  # two sums 4, dx 5
    "_weight_norm_interface_backward": 6,  # a sum 2, dx 4
    "linalg_vector_norm": 2, "addcmul": 2, "addcmul_": 2, "lerp": 3, "mv": 2,
}  # fmt: skip


class Operations(Counter):
    """Count operations, bytes, and FLOPs."""

    flops = 0

    def _count_kernel(self, name, given):
        super()._count_kernel(name, given)
        self.flops += kernel_flops(name, given) * given["x"].numel()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE | MOVERS and not (name.startswith("new_") or name.endswith("_like")):
            sums_alone = name == "native_batch_norm_backward" and out[0] is None
            sizes = [t.numel() for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
            self.flops += (4 if sums_alone else FLOPS.get(name, 1)) * max(sizes, default=0)
        return out


def kernel_flops(name: str, given: dict[str, Any]) -> int:
    """FLOPs per element of x of a C++ kernel with these arguments."""
    has = {key: value is not None for key, value in given.items()}
    if name == "row_forward":  # sum of squares, times the factor, weight and bias
        return 2 + 1 + has["weight"] + has["bias"]
    if name == "row_backward":  # sum of squares, sums of dy and dy z, g, its sum with z, dx
        return 2 + 4 * has["sums"] + has["weight"] + 2 + 3
    groups = bool(given["groups"])
    if name == "standardize":
        return 2 + bool(given["center"]) + 3 * groups
    if name == "train":
        return 2 + 3 * bool(given["center"]) + 2 + 3 * groups
    if name == "differentiate":
        return 3 + 3 + 3 * bool(given["center"]) + 8 * groups
    mean = has.get("mean", False)
    if name == "column_forward":  # y, moments, layer-scale
        return has.get("y", False) * (2 + mean) + has["stat"] * (4 if given.get("center") else 2) + 3 * groups
    return has["sums"] * (3 + mean) + has["dx"] * (3 + 2 * mean + 5 * groups) + 3 * groups


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


def passes(norm: nn.Module, x: Tensor, mask: Tensor | None, counter: type[Counter]) -> tuple[Any, Any]:
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
                ("native", x, masks[0], Operations), ("fused", x, masks[0], Counter),
                ("triton", small, masks[1], Launches),
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
