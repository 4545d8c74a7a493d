"""Curves for charts: finite points, smoothed and thinned."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

Value = TypeVar("Value")

SMOOTH = 50  # a curve of training losses is averaged over a fiftieth of the run


def losses(result: Mapping[str, Any]) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and losses of a result: training (averaged over 2 % of it) and validation."""
    steps, values = _points(result["curve"], "train_loss")
    return {
        "training loss": (steps, smooth(values, len(values) // SMOOTH)),
        "validation loss": _points(result["valid"], "loss"),
    }


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` in all.

    >>> smooth([1.0, 3.0, 5.0], 2)
    [1.0, 2.0, 4.0]
    """
    import numpy as np

    if not values:
        return []
    window, count = max(1, window), len(values)
    sums = np.convolve(values, np.ones(window))[:count]  # running sums would lose all digits after a large loss
    return (sums / np.minimum(np.arange(count) + 1, window)).tolist()


def thin(values: Sequence[Value], count: int) -> list[Value]:
    """Keep at most `count` values, evenly spaced, the first and the last among them.

    >>> thin([0, 1, 2, 3, 4, 5, 6], 3)
    [0, 3, 6]
    """
    if len(values) <= count:
        return list(values)
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]


def extremes(steps: Sequence[int], values: Sequence[float], count: int) -> tuple[list[int], list[float]]:
    """Keep at most `count` points, the lowest and the highest of each stretch.

    >>> extremes([0, 1, 2, 3, 4, 5], [1.0, 9.0, 2.0, 2.0, 0.0, 3.0], 4)
    ([0, 1, 4, 5], [1.0, 9.0, 0.0, 3.0])
    """
    if len(values) <= count:
        return list(steps), list(values)
    parts = max(1, count // 2)
    chosen = []
    for part in range(parts):
        inside = range(part * len(values) // parts, (part + 1) * len(values) // parts)
        chosen += sorted({min(inside, key=values.__getitem__), max(inside, key=values.__getitem__)})
    return [steps[i] for i in chosen], [values[i] for i in chosen]


def _points(records: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[float]]:
    found = [(record["step"], record[name]) for record in records if math.isfinite(record[name])]
    return [step for step, _ in found], [value for _, value in found]
