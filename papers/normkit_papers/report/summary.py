"""The table of runs: means over seeds with intervals, and what folding changed."""

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from normkit._util import align, narrow
from normkit_papers.report.seeds import difference, interval
from normkit_papers.report.settings import Results, job, labels
from normkit_papers.tasks import METRICS, Metric

WIDTH = 120  # characters of a line
KINDS = {
    "running": "greedy",
    "calibrated": "greedy, calibrated",
    "folded": "greedy, folded",
    "beam": "beam search",
}
"""Kinds of scores in the order of the columns; those to compare stand together."""
NOTHING = {"seeds": "1", "status": "done"}
"""Cells without information; a column of these alone is left out, and one of dashes."""
ABOUT = (
    "± is a 95 % interval: of the mean over seeds or, of one seed, of the sampling error of the test set. A run is "
    "level with the best one if the interval of their difference, not paired by seed, contains 0. Of copies of a run "
    "the first counts."
)
TIMES = " Times are those to decode 64 words on one thread, with ? if other load disturbed them."


class Group(NamedTuple):
    """Runs that differ in their seed alone."""

    label: str
    results: list[Mapping[str, Any]]

    def values(self, kind: str, metric: Metric) -> list[float]:
        """Scores of the seeds; one of a single seed has a sampling error, see `error`."""
        scores = [result["scores"].get(kind) or {} for result in self.results]
        return [float(score[metric.key]) for score in scores if isinstance(score.get(metric.key), int | float)]

    def error(self, kind: str, metric: Metric) -> float:
        """Sampling error of the first seed's score; nan if it is unknown."""
        score = self.results[0]["scores"].get(kind) or {}
        error = score.get(f"{metric.key}_error")
        if error is None and metric.key == "accuracy" and score.get("n"):
            value = score[metric.key]
            error = 100 * math.sqrt(max(value * (100 - value), 0) / 1e4 / score["n"])
        return math.nan if error is None else error

    def lacks(self, best: "Group", kind: str, metric: Metric) -> tuple[float, float]:
        """How far the best group is ahead, and half the 95 % interval; nan if that is not known."""
        errors = best.error(kind, metric), self.error(kind, metric)
        less, half = difference(best.values(kind, metric), self.values(kind, metric), errors)
        return metric.better * less, half

    def fold(self, name: str) -> Any:
        """A fact about folding; None if it is unknown."""
        return next((found[name] for result in self.results if (found := result.get("fold") or {}).get(name)), None)


def groups(results: Results) -> dict[str, list[Group]]:
    """Group results by task and data, and there by settings without the seed."""
    names = labels(results)
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for folder, result in results.items():
        same = found.setdefault(" on ".join(job(result)), {}).setdefault(names[folder], [])
        settings = {**result["run"], "name": ""}
        if all({**each["run"], "name": ""} != settings for each in same):  # a copy is no other sample
            same.append(result)
    return {kind: [Group(*pair) for pair in members.items()] for kind, members in found.items()}


def cells(members: Sequence[Group]) -> list[list[str]]:
    """Format the table of one task, without columns that have no information."""
    wanted = [
        (metric, kind)
        for metric in METRICS
        for kind in KINDS
        if any(group.values(kind, metric) for group in members) and (metric.key != "loss" or kind == "running")
    ]
    first = dict(reversed(wanted))
    scores = [f"{metric.name} {KINDS[kind]}" if first[metric] == kind else KINDS[kind] for metric, kind in wanted]
    times = ["ms as trained", "ms folded", "largest error"]
    heads = ["norm", "seeds", *scores, "to the best", "folds", *times, "parameters", "minutes", "status"]
    lines = [list(_row(group, members, wanted)) for group in members]
    told = [any(line[place] != NOTHING.get(head, "-") for line in lines) for place, head in enumerate(heads)]
    return [[cell for cell, is_told in zip(line, told, strict=True) if is_told] for line in (heads, *lines)]


def _row(group: Group, members: Sequence[Group], wanted: Sequence[tuple[Metric, str]]) -> Iterator[str]:
    yield group.label
    yield str(len(group.results))
    for metric, kind in wanted:
        values, digits = group.values(kind, metric), 3 if metric.key == "loss" else 1
        yield _number(*interval(values, group.error(kind, metric)), digits) if values else "-"
    yield _to_the_best(group, members, wanted)
    yield group.fold("foldable") or "-"
    for name in ("seconds_trained", "seconds_folded"):
        seconds = group.fold(name)
        yield f"{1000 * seconds:.1f}{'?' * bool(group.fold('obstacle'))}" if seconds else "-"
    error = group.fold("max_error")
    yield "-" if error is None else f"{error:.0e}"
    yield f"{group.results[0]['parameters']:,}"
    yield f"{statistics.fmean((result['seconds'].get('train') or 0) / 60 for result in group.results):.1f}"
    ended = [result["status"] for result in group.results if result["status"] != "done"]
    several = f"{len(ended)} of {len(group.results)} " if len(group.results) > 1 else ""
    yield f"{several}{ended[0]}" if ended else "done"


def _to_the_best(group: Group, members: Sequence[Group], wanted: Sequence[tuple[Metric, str]]) -> str:
    """Format what a group lacks to the best one by the task's first metric, of beam search if all have it."""
    metric = wanted[0][0] if wanted else METRICS[-1]
    scored = [each for each in members if each.values("running", metric)]
    if group not in scored or not scored[1:]:
        return "-"
    kind = "beam" if all(each.values("beam", metric) for each in scored) else "running"
    best = max(scored, key=lambda each: metric.better * statistics.fmean(each.values(kind, metric)))
    return "best" if group is best else _number(*group.lacks(best, kind, metric), 2)


def _number(mean: float, half: float, digits: int) -> str:
    return f"{mean:,.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def text(results: Results) -> str:
    """Format the tables; columns that a line has no room for stand below, with the norms."""
    parts = list[str]()
    for kind, members in groups(results).items():
        parts += [
            kind,
            *(align(lines, right=range(1, len(lines[0])), heads=1) for lines in narrow(cells(members), WIDTH)),
        ]
    return "\n\n".join([*parts, textwrap.fill(about(results), WIDTH)])


def about(results: Results) -> str:
    """Explain the intervals of the tables and, where there are some, the times."""
    return ABOUT + TIMES * any((result.get("fold") or {}).get("seconds_trained") for result in results.values())
