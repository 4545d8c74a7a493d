"""What recording costs: a training step with and without it, one beside the other.

    OMP_NUM_THREADS=1 python benchmarks/watch.py [--device cuda] [--every 25] [--blocks 30]

Each block times `every` steps of the same model without and with `nk.record`, so that it holds one look, in an order
that changes from block to block; the figure is the median over blocks of the ratio, with its quartiles. On a CPU the
process's own time is counted, in one thread; other work on the machine still disturbs it through caches.
"""

import argparse
import json
import platform
import statistics
import time

import torch
from torch import nn

import normkit as nk


def encoder(width: int, depth: int, norm: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
    return model if norm == "LayerNorm" else nk.convert(model, norm)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()


def seconds(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int, quantities) -> float:
    def run() -> float:
        clock = time.perf_counter if x.is_cuda else time.process_time
        started = clock()
        for _ in range(steps):
            step(model, optimizer, x)
        if x.is_cuda:
            torch.cuda.synchronize()
        return clock() - started

    if quantities is None:
        return run()
    with nk.record(model, every=steps, quantities=quantities):
        return run()


def measure(name: str, model: nn.Module, x: torch.Tensor, every: int, blocks: int) -> dict:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    for quantities in (None, "all"):
        seconds(model, optimizer, x, 3, quantities)
    found = {}
    for quantities in ("default", "all"):
        ratios = []
        for block in range(blocks):
            order = (None, quantities) if block % 2 else (quantities, None)
            took = {kind: seconds(model, optimizer, x, every, kind) for kind in order}
            ratios.append(100 * (took[quantities] / took[None] - 1))
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[quantities] = {"percent": round(middle, 2), "quartiles": [round(low, 2), round(high, 2)]}
    return {"model": name, "every": every, "blocks": blocks, **found}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--blocks", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for width, depth, shape in ((64, 2, (16, 16)), (256, 4, (16, 32))):
        for norm in ("LayerNorm", "un"):
            model = encoder(width, depth, norm).to(options.device)
            x = torch.randn(*shape, width, device=options.device)
            name = f"encoder {depth} layers, width {width}, {shape[0]} x {shape[1]} tokens, {norm}, {options.device}"
            print(json.dumps(measure(name, model, x, options.every, options.blocks)))


if __name__ == "__main__":
    main()
