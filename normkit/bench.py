"""Comparison of running times: variants by turns on one pinned thread, and a check for noise.

`torch.utils.benchmark.Timer` times one statement for a while, then the next one, and so compares them in different
states of a shared machine. Here a ratio is taken within a round, in which all variants ran one after another.
"""

import contextlib
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.norms import Norm, StatNorm, make

ROUNDS = 60  # fewer paired rounds allow no verdict
WARMUP = 3  # rounds that do not count
TOLERANCE = 0.02  # of the ratio of a variant to itself
CACHE = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes, more than any cache holds; on a GPU also a head start for the host
LAYER = "nn.LayerNorm"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios within rounds, and their 20th and 80th percentile."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(seconds: Sequence[float], base: Sequence[float]) -> Ratio:
    """Compute the ratio of two variants, taken round by round.

    >>> str(ratio([2.0, 2.0, 3.0], [1.0, 1.0, 1.0]))
    '2.00 (2.00-2.60)'
    """
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0], 1)
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return Ratio(round(tenths[4], 4), round(tenths[1], 4), round(tenths[7], 4), len(ratios))


@dataclass(frozen=True)
class Timings:
    """Seconds of all variants.

    Attributes:
        seconds: Seconds of each variant in each round.
        repeated: Seconds of the first variant, timed a second time in each round.
    """

    seconds: Mapping[str, list[float]]
    repeated: list[float]

    def median(self, variant: str) -> float:
        """Median of a variant's seconds."""
        return statistics.median(self.seconds[variant])

    def ratio(self, variant: str, base: str) -> Ratio:
        """Time of a variant over that of another."""
        return ratio(self.seconds[variant], self.seconds[base])

    @property
    def noise(self) -> float:
        """Ratio of the first variant to itself: 1 on a quiet machine."""
        return ratio(self.repeated, next(iter(self.seconds.values()))).median

    @property
    def obstacle(self) -> str:
        """The reason why these timings allow no verdict; empty if they do."""
        if len(self.repeated) < ROUNDS:
            return f"a verdict needs at least {ROUNDS} rounds; got {len(self.repeated)}"
        if abs(self.noise - 1) > TOLERANCE:
            return f"this machine is too noisy: a variant took {self.noise:.2f} of its own time"
        return ""


def measure(
    runs: Mapping[str, Callable[[], object]], rounds: int = ROUNDS, *, threads: int = 1, device: str = "cpu"
) -> Timings:
    """Time variants by turns.

    Each round runs every variant once, and the first one twice, in an order drawn for the round: in a fixed one the
    first would always follow itself, which made calls of 1 to 3 ms 3 % faster. Before each run a buffer larger than the
    caches is written. Warm-up rounds go first and do not count.

    Args:
        runs: Variants by name.
        rounds: Rounds that count.
        threads: Threads of PyTorch. One thread is pinned to a core; more are not.
        device: "cpu", or "cuda" to time between events on the device.
    """
    variants, chance = [*runs.items(), ("", next(iter(runs.values())))], random.Random(0)
    flushed = torch.zeros(CACHE[device] // 4, device=device)
    marks: dict[str, list] = {name: [] for name, _ in variants}
    with _one_core(threads):
        for turn in range(rounds + WARMUP):
            for name, run in chance.sample(variants, len(variants)):
                flushed.add_(1)
                mark = _time_on_device(run) if device == "cuda" else _time(run)
                if turn >= WARMUP:
                    marks[name].append(mark)
    if device == "cuda":
        torch.cuda.synchronize()
        marks = {name: [a.elapsed_time(b) / 1e3 for a, b in pairs] for name, pairs in marks.items()}
    repeated = marks.pop("")
    return Timings(marks, repeated)


def measure_norms(
    specs: Sequence[str], rows: int, dim: int, *, dtype: str = "float32", rounds: int = ROUNDS, device: str = "cpu",
    compiled: bool = False, threads: int = 1,
) -> list[dict[str, Any]]:  # fmt: skip
    """Time norms on activations `[rows, dim]` beside `nn.LayerNorm`.

    Norms with a warm-up are in their state after it.

    Args:
        specs: Specs of norms, such as "un(window=8)".
        rows: Number of tokens.
        dim: Number of channels.
        dtype: Type of the activations, a key of `DTYPES`.
        rounds: Rounds of turns.
        device: "cpu" or "cuda".
        compiled: Also time each norm compiled by Inductor.
        threads: Threads of PyTorch.

    Returns:
        A row for each norm and provider, of forward and backward ("train") and of a forward with frozen statistics
        ("inference"). `ratio` is to `nn.LayerNorm` in the same round, the median over rounds; `low` and `high` are the
        20th and 80th percentile. `noise` is the ratio of `nn.LayerNorm` to itself, `verdict` the reason why the row
        allows none.

    Examples:
        >>> [row["norm"] for row in measure_norms(["rms"], 8, 4, rounds=1)]
        ['nn.LayerNorm', 'rms', 'rms', 'nn.LayerNorm', 'rms', 'rms']
    """
    kind, table = DTYPES[dtype], []
    torch.manual_seed(0)
    x, dy = torch.randn(2, rows, dim, device=device).to(kind)
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    for mode in ("train", "inference"):
        prepare = _training if mode == "train" else _inference
        runs = {f"torch {LAYER}": prepare(nn.LayerNorm(dim, device=device, dtype=kind), x, dy)}
        for spec in specs:
            for provider, norm in _providers(spec, dim, compiled).items():
                runs[f"{provider} {spec}"] = prepare(norm.to(device, kind), x, dy)
        timings = measure(runs, rounds, threads=threads, device=device)
        for run in timings.seconds:
            provider, spec = run.split(" ", 1)
            found = timings.ratio(run, f"torch {LAYER}")
            table.append({
                "device": name, "threads": threads, "torch": torch.__version__, "provider": provider,
                "norm": spec, "pass": mode, "shape": f"{rows}x{dim}", "dtype": dtype, "rounds": rounds,
                "ms": round(1e3 * timings.median(run), 3), "low": round(found.low, 2),
                "ratio": round(found.median, 2), "high": round(found.high, 2), "noise": round(timings.noise, 3),
                "verdict": timings.obstacle,
            })  # fmt: skip
    return table


def skip_warmup(norm: Norm) -> Norm:
    """Put a norm into its state after any warm-up."""
    if isinstance(norm, StatNorm):
        norm.step.fill_(2**31)
        if (end := getattr(norm, "warmup_end", None)) is not None:
            end.fill_(1)
            norm._ended.seen = 1  # a GPU's copy would take some steps
    return norm


@contextlib.contextmanager
def use_threads(count: int | None) -> Iterator[None]:
    """Use so many threads of PyTorch inside the block; None for as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _providers(spec: str, dim: int, compiled: bool) -> dict[str, nn.Module]:
    """Implementations of a norm: normkit's, PyTorch's, and with `compiled` Inductor's."""
    found: dict[str, nn.Module] = {"normkit": skip_warmup(make(spec, dim))}
    if spec == "rms":
        found["torch"] = nn.RMSNorm(dim, eps=1e-5)
    if spec == "batch":
        found["torch"] = nn.BatchNorm1d(dim)
    if compiled:
        found["compiled"] = torch.compile(skip_warmup(make(spec, dim)))  # type: ignore[assignment]
    return found


def _training(norm: nn.Module, x: Tensor, dy: Tensor) -> Callable[[], object]:
    """Return a function that runs one forward and backward, without accumulating gradients."""
    x = x.clone().requires_grad_()
    inputs = [x, *norm.parameters()]
    return lambda: torch.autograd.grad(norm(x), inputs, dy)


def _inference(norm: nn.Module, x: Tensor, _: Tensor) -> Callable[[], object]:
    """Return a function that runs one forward in evaluation mode."""
    norm.eval()

    def run() -> Tensor:
        with torch.no_grad():
            return norm(x)

    return run


def _time(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _time_on_device(run: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    return start, end


@contextlib.contextmanager
def _one_core(threads: int) -> Iterator[None]:
    """Use so many threads; a single one stays on one core, where the system allows that."""
    cores = os.sched_getaffinity(0) if threads == 1 and hasattr(os, "sched_getaffinity") else set()
    with use_threads(threads):
        try:
            if cores:
                os.sched_setaffinity(0, {max(cores)})
            yield
        finally:
            if cores:
                os.sched_setaffinity(0, cores)
