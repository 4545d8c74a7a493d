"""Comparison of running times: turns on one pinned thread, and a check for noise.

`torch.utils.benchmark.Timer` times one statement for a while, then the next one, and so compares them in different
states of a shared machine. Here a ratio is taken within a round, in which all variants ran one after another.
"""

import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

ROUNDS = 60  # fewer paired rounds allow no verdict
WARMUP = 3  # rounds that do not count
TOLERANCE = 0.02  # of the ratio of a variant to itself
CACHE = {"cpu": 64 << 20, "cuda": 1 << 30}  # bytes, more than any cache holds; on a GPU also a head start for the host


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios within rounds, and their 20th and 80th percentile."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def ratio(seconds: list[float], base: list[float]) -> Ratio:
    """Ratio of two variants, taken round by round.

    >>> str(ratio([2.0, 2.0, 3.0], [1.0, 1.0, 1.0]))
    '2.00 (2.00-2.60)'
    """
    ratios = [a / b for a, b in zip(seconds, base, strict=True)]
    if len(ratios) == 1:
        return Ratio(ratios[0], ratios[0], ratios[0], 1)
    tenths = statistics.quantiles(ratios, n=10, method="inclusive")
    return Ratio(round(tenths[4], 4), round(tenths[1], 4), round(tenths[7], 4), len(ratios))


def obstacle(noise: float, rounds: int) -> str:
    """The reason why timings allow no verdict; empty if they do.

    >>> obstacle(1.05, 60)
    'this machine is too noisy: a variant took 1.05 of its own time'
    """
    if rounds < ROUNDS:
        return f"a verdict needs at least {ROUNDS} rounds; got {rounds}"
    if abs(noise - 1) > TOLERANCE:
        return f"this machine is too noisy: a variant took {noise:.2f} of its own time"
    return ""


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
        return obstacle(self.noise, len(self.repeated))


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

    Example:
        >>> timings = measure({"nothing": lambda: None}, rounds=3)
        >>> len(timings.seconds["nothing"]), len(timings.repeated)
        (3, 3)
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
def use_threads(count: int | None) -> Iterator[None]:
    """Use so many threads of PyTorch inside the block; None for as many as before."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
