"""The table of runs, with means over seeds, and the conclusions from it."""

import math
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from normkit._util import align
from normkit_papers.report.seeds import difference, interval
from normkit_papers.report.settings import Results, job, labels
from normkit_papers.tasks import METRICS, Metric

WIDTH = 120
KINDS = {
    "running": "greedy",
    "calibrated": "greedy, calibrated",
    "folded": "greedy, folded",
    "beam": "beam search",
}
"""Kinds of scores in the order of the columns; those to compare stand together."""
NOTHING = {"seeds": "1", "status": "done"}
"""Cells that say nothing; a column of these alone is left out, and one of dashes."""


class Group(NamedTuple):
    """Runs that differ in their seed alone."""

    label: str
    results: list[Mapping[str, Any]]

    def values(self, kind: str, metric: Metric) -> list[float]:
        """Scores of the seeds; one of a single seed has a sampling error, see `error`."""
        scores = [result["scores"].get(kind) or {} for result in self.results]
        return [float(score[metric.key]) for score in scores if isinstance(score.get(metric.key), int | float)]

    def error(self, kind: str, metric: Metric) -> float:
        """Half the 95 % interval: over seeds, or of the test set for one seed; nan if unknown."""
        values = self.values(kind, metric)
        if len(values) != 1:
            return interval(values)[1] if values else math.nan
        score = self.results[0]["scores"][kind]
        error = score.get(f"{metric.key}_error")
        if error is None and metric.key == "accuracy" and score.get("n"):
            error = 100 * math.sqrt(max(values[0] * (100 - values[0]), 0) / 1e4 / score["n"])
        return math.nan if error is None else 1.96 * error

    def fold(self, name: str) -> Any:
        """A fact about folding; None if it is unknown."""
        return next((found[name] for result in self.results if (found := result.get("fold") or {}).get(name)), None)


def groups(results: Results) -> dict[str, list[Group]]:
    """Group results by task and data, and there by settings without the seed."""
    names = labels(results)
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {}
    for folder, result in results.items():
        found.setdefault(" on ".join(job(result)), {}).setdefault(names[folder], []).append(result)
    return {kind: [Group(*pair) for pair in members.items()] for kind, members in found.items()}


def main_metric(members: Sequence[Group]) -> Metric | None:
    """The first metric that a run has a score of."""
    return next((metric for metric in METRICS for group in members if group.values("running", metric)), None)


def cells(members: Sequence[Group]) -> list[list[str]]:
    """Format the table of one task: a heading, then a row for each group; columns that say nothing are left out."""
    wanted = [
        (metric, kind)
        for metric in METRICS
        for kind in KINDS
        if any(group.values(kind, metric) for group in members) and (metric.key != "loss" or kind == "running")
    ]
    first = dict(reversed(wanted))
    scores = [f"{metric.name} {KINDS[kind]}" if first[metric] == kind else KINDS[kind] for metric, kind in wanted]
    heads = ["norm", "seeds", *scores, "folds", "parameters", "minutes", "status"]
    lines = [list(_row(group, wanted)) for group in members]
    told = [any(line[place] != NOTHING.get(head, "-") for line in lines) for place, head in enumerate(heads)]
    return [[cell for cell, is_told in zip(line, told, strict=True) if is_told] for line in (heads, *lines)]


def _row(group: Group, wanted: Sequence[tuple[Metric, str]]) -> Iterator[str]:
    yield group.label
    yield str(len(group.results))
    yield from (_number(group, kind, metric) for metric, kind in wanted)
    yield group.fold("foldable") or "-"
    yield f"{group.results[0]['parameters']:,}"
    yield f"{statistics.fmean((result['seconds'].get('train') or 0) / 60 for result in group.results):.1f}"
    ended = [result["status"] for result in group.results if result["status"] != "done"]
    several = f"{len(ended)} of {len(group.results)} " if len(group.results) > 1 else ""
    yield f"{several}{ended[0]}" if ended else "done"


def _number(group: Group, kind: str, metric: Metric) -> str:
    if not (values := group.values(kind, metric)):
        return "-"
    digits, mean, half = (3 if metric.key == "loss" else 1), interval(values)[0], group.error(kind, metric)
    return f"{mean:,.{digits}f}" + ("" if math.isnan(half) else f" ± {half:.{digits}f}")


def text(results: Results) -> str:
    """Format tables and conclusions, as commands print them."""
    parts = []
    for kind, members in groups(results).items():
        lines = cells(members)
        parts += [kind, align(lines, right=range(1, len(lines[0])), heads=1)]
        parts.append("\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in sentences(members)))
    return "\n\n".join(parts)


def sentences(members: Sequence[Group]) -> list[str]:
    """State which norms are best, what running statistics cost, and what folding changed.

    Two scores are level if the 95 % interval of their difference contains 0.
    """
    metric = main_metric(members)
    if metric is None:
        return []
    scored = [group for group in members if group.values("running", metric)]
    kind = "beam" if all(group.values("beam", metric) for group in scored) else "running"
    best = max(scored, key=lambda group: metric.better * interval(group.values(kind, metric))[0])
    others = [f"{group.label} {_behind(best, group, kind, metric)}" for group in scored if group is not best]
    found = [
        f"Best by {metric.name} ({KINDS[kind]}, {'more' if metric.better > 0 else 'less'} is better): {best.label}, "
        f"{_number(best, kind, metric)}; ± is a 95 % interval of "
        + ("the mean over seeds." if len(best.results) > 1 else "the sampling error of the test set, not of training.")
        + (f" Behind it: {', '.join(others)}." if others else "")
    ]
    for group in scored:
        running, calibrated = (group.values(each, metric) for each in ("running", "calibrated"))
        if running and calibrated:
            gain = metric.better * (interval(calibrated)[0] - interval(running)[0])
            if gain > max(group.error("running", metric), 0):
                found.append(
                    f"{group.label} loses by its running statistics: {metric.name} {_number(group, 'running', metric)},"
                    f" calibrated {_number(group, 'calibrated', metric)}."
                )
        if (error := group.fold("max_error")) is not None:
            found.append(
                f"{group.label} folded: {group.fold('foldable')} norms are gone, outputs differ by at most {error:.0e};"
                f" {metric.name} greedy {_number(group, 'folded', metric)}, before {_number(group, 'running', metric)}."
            )
            found += _times(group, members)
    return found


def difference_of(a: Group, b: Group, kind: str, metric: Metric) -> tuple[float, float]:
    """How far group `a` is ahead of `b`, and half the 95 % interval; nan if it is not known."""
    first, second = a.values(kind, metric), b.values(kind, metric)
    less, half = difference(first, second)
    return metric.better * less, math.hypot(a.error(kind, metric), b.error(kind, metric)) if math.isnan(half) else half


def _behind(best: Group, group: Group, kind: str, metric: Metric) -> str:
    less, half = difference_of(best, group, kind, metric)
    return f"by {less:.2f}" + ("" if math.isnan(half) else f" ± {half:.2f}{' (level)' if less <= half else ''}")


def _times(group: Group, members: Sequence[Group]) -> list[str]:
    seconds = {"as trained": group.fold("seconds_trained"), "folded": group.fold("seconds_folded")}
    layer = next((each.fold("seconds_trained") for each in members if each.label == "layer"), None)
    if not all(seconds.values()):
        return []
    if obstacle := group.fold("obstacle"):
        return [f"No verdict on time: {obstacle}."]
    base = seconds["as trained"] if layer is None else layer
    ratios = ", ".join(f"{name} {value / base:.2f}" for name, value in seconds.items())
    return [f"Time of {group.label}, where {'it as trained' if layer is None else 'layer'} takes 1: {ratios}."]
