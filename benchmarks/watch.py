"""Cost of recording: training steps with a measurement, without one, and unrecorded.

    OMP_NUM_THREADS=1 python benchmarks/watch.py [--device cuda] [--every 25] [--rounds 60]     # about 2 minutes

Each round times the same model two steps long, three times, in an order that changes: without `nk.record`; with it, in
a measured step and the next, which computes its numbers; with it, in steps that are not measured. `percent` is the
extra cost of `every` steps with one measurement, `idle` the part of the hooks: first quartile, median and third over
rounds. On a CPU the process's own time counts, in one thread; other work still disturbs it through caches.
"""

import argparse
import contextlib
import json
import platform
import statistics
import time

import torch
from torch import nn

import normkit as nk

NEVER = 10**9
TURNS = ("without", "measured", "idle")


def encoder(width: int, depth: int, norm: str) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, depth, norm=nn.LayerNorm(width), enable_nested_tensor=False)
    return model if norm == "LayerNorm" else nk.convert(model, norm)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(x) - x).square().mean().backward()
    optimizer.step()


def seconds(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, turn: str, quantities: str) -> float:
    """Two steps, after two to get going."""
    clock = time.perf_counter if x.is_cuda else time.process_time
    every = 2 if turn == "measured" else NEVER
    with contextlib.nullcontext() if turn == "without" else nk.record(model, every=every, quantities=quantities):
        for _ in range(2):
            if x.is_cuda:
                torch.cuda.synchronize()
            started = clock()
            for _ in range(2):
                step(model, optimizer, x)
            if x.is_cuda:
                torch.cuda.synchronize()
    return clock() - started


def measure(model: nn.Module, x: torch.Tensor, every: int, rounds: int) -> dict:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=True)
    found: dict = {}
    for quantities in ("default", "all"):
        percent, idle, plain = [], [], []
        for number in range(rounds):
            order = TURNS[number % 3 :] + TURNS[: number % 3]
            took = {turn: seconds(model, optimizer, x, turn, quantities) for turn in order}
            extra, hooks = took["measured"] - took["without"], (took["idle"] - took["without"]) / 2
            percent.append(100 * (extra + (every - 2) * hooks) / (every * took["without"] / 2))
            idle.append(100 * hooks / (took["without"] / 2))
            plain.append(1e3 * took["without"] / 2)
        found["ms a step"] = round(statistics.median(plain), 2)
        found[quantities] = {"percent": middle(percent), "idle": middle(idle)}
    return found


def middle(values: list[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return [round(value, 2) for value in statistics.quantiles(values, n=4)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--every", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    torch.manual_seed(0)
    print(f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for width, depth, shape in ((64, 2, (16, 16)), (256, 4, (16, 32))):
        for norm in ("LayerNorm", "un"):
            model = encoder(width, depth, norm).to(options.device)
            x = torch.randn(*shape, width, device=options.device)
            name = f"encoder {depth} layers, width {width}, {shape[0]} x {shape[1]} tokens, {norm}, {options.device}"
            found = measure(model, x, options.every, options.rounds)
            print(json.dumps({"model": name, "every": options.every, "rounds": options.rounds, **found}), flush=True)


if __name__ == "__main__":
    main()
