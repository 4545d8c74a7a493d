"""Runs that differ only in their seed: means and 95 % confidence intervals."""

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from normkit_papers.report.settings import Result, Results

CONFIDENT = 1.96  # sampling errors to each side hold a figure in 95 of 100 cases


def pool(results: Results) -> dict[Any, Result]:
    """Replace runs that differ only in their seed by one result with their means.

    A pooled result has the folder of its first run, "seeds" (the number of runs) and no seed; `METRIC_error` is the
    half of the 95 % interval over seeds, divided by 1.96. It has the kinds of scores that all scored runs have. Runs
    without scores are counted in its status. A second run of the same seed, such as a copy, is no further sample: it is
    pooled with other second runs.
    """
    members: dict[tuple[str, int], list[Any]] = {}
    earlier = Counter[str]()  # runs by settings and seed
    for folder, result in results.items():
        every = json.dumps({**result["run"], "name": ""}, sort_keys=True, default=str)
        settings = json.dumps({**result["run"], "name": "", "seed": 0}, sort_keys=True, default=str)
        members.setdefault((settings, earlier[every]), []).append(folder)
        earlier[every] += 1
    return {
        folders[0]: _pooled([results[folder] for folder in folders]) if len(folders) > 1 else results[folders[0]]
        for folders in members.values()
    }


def _pooled(runs: Sequence[Result]) -> dict[str, Any]:
    scored = [run for run in runs if run["scores"]]
    ended = [run["status"] for run in runs if run["status"] != "done"]
    status = f"{len(runs) - len(ended)} of {len(runs)} done; {ended[0]}" if ended else "done"
    run = {key: value for key, value in runs[0]["run"].items() if key not in ("seed", "name")}
    # of kinds that some seeds lack, such as after folding, means would be over other seeds than those beside them
    kinds = [kind for kind in (scored[0]["scores"] if scored else ()) if all(kind in each["scores"] for each in scored)]
    scores = {kind: _means([each["scores"][kind] for each in scored], errors=True) for kind in kinds}
    speed = _means([each["speed"] for each in runs], errors=False)
    return {**runs[0], "run": run, "status": status, "scores": scores, "speed": speed, "seeds": len(runs)}


def _means(records: Sequence[Mapping[str, Any]], errors: bool) -> dict[str, float]:
    found = {}
    for name in dict.fromkeys(name for record in records for name in record if not name.endswith("_error")):
        values = [value for record in records if isinstance(value := record.get(name), int | float)]
        if values:
            found[name], half = interval(values)
            if name == "n":
                found[name] = values[0]
            elif errors and math.isfinite(half):
                found[f"{name}_error"] = half / CONFIDENT
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean over seeds, and half its 95 % interval by Student's t.

    The interval is nan for one seed, or if a value is not finite.

    >>> mean, half = interval([31.0, 32.0, 33.0])
    >>> mean, round(half, 2)
    (32.0, 2.48)
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return statistics.fmean(values), math.nan
    from scipy import stats

    quantile = float(stats.t.ppf(0.975, len(values) - 1))
    return statistics.fmean(values), quantile * math.sqrt(statistics.variance(values) / len(values))


def difference(first: Sequence[float], second: Sequence[float]) -> str:
    """Describe the difference of two means over seeds with its 95 % interval (Welch's t).

    >>> difference([31.0, 32.0, 33.0], [31.5, 32.0, 33.5])
    '-0.33 (95 % interval -2.65 to 1.98): not distinguishable'
    >>> difference([31.0], [33.0])
    '-2.00; two seeds of each show whether this may be chance (--seed)'
    """
    less = statistics.fmean(first) - statistics.fmean(second)
    if min(len(first), len(second)) == 1:
        return f"{less:.2f}; two seeds of each show whether this may be chance (--seed)"
    if not math.isfinite(less):
        return f"{less:.2f}: a score is not finite"
    parts = [(statistics.variance(values) / len(values), len(values) - 1) for values in (first, second)]
    error = sum(part for part, _ in parts)  # squared
    if error == 0:
        return f"{less:.2f}, the same in all seeds"
    from scipy import stats

    half = float(stats.t.ppf(0.975, error**2 / sum(part**2 / free for part, free in parts))) * math.sqrt(error)
    verdict = "more than chance" if abs(less) > half else "not distinguishable"
    return f"{less:.2f} (95 % interval {less - half:.2f} to {less + half:.2f}): {verdict}"
