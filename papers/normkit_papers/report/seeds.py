"""Means over seeds and their differences, with 95 % confidence intervals."""

import math
import statistics
from collections.abc import Sequence


def interval(values: Sequence[float], error: float = math.nan) -> tuple[float, float]:
    """Mean over seeds, and half its 95 % interval by Student's t.

    Of one value the interval is that of its sampling `error`, one standard deviation; nan if this is unknown, or if a
    value is not finite.

    >>> mean, half = interval([31.0, 32.0, 33.0])
    >>> mean, round(half, 2)
    (32.0, 2.48)
    """
    from scipy import stats

    mean = statistics.fmean(values)
    if len(values) == 1 or not math.isfinite(mean):
        return mean, 1.96 * error if len(values) == 1 else math.nan
    return mean, float(stats.t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))


def difference(
    first: Sequence[float], second: Sequence[float], errors: tuple[float, float] = (math.nan, math.nan)
) -> tuple[float, float]:
    """Difference of two means over seeds, and half its 95 % interval by Welch's t.

    With one value of either, the interval is that of both by themselves, see `interval`.

    >>> less, half = difference([31.0, 32.0, 33.0], [31.5, 32.0, 33.5])
    >>> round(less, 2), round(half, 2)
    (-0.33, 2.32)
    """
    from scipy import stats

    less = statistics.fmean(first) - statistics.fmean(second)
    if min(len(first), len(second)) == 1 or not math.isfinite(less):
        return less, math.hypot(interval(first, errors[0])[1], interval(second, errors[1])[1])
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (first, second)]
    error = sum(part for part, _ in parts)  # squared
    free = error**2 / sum(part**2 / each for part, each in parts) if error else 1.0
    return less, float(stats.t.ppf(0.975, free)) * math.sqrt(error)
