"""The table of runs, with means over seeds, and the conclusions from it."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from normkit._util import align
from normkit_papers.report.seeds import difference, interval
from normkit_papers.report.settings import Results, job, labels
from normkit_papers.tasks import METRICS, Metric

WIDTH = 120
KINDS = {
    "beam": "beam search",
    "running": "greedy",
    "calibrated": "greedy, calibrated",
    "folded": "greedy, folded",
}
"""Kinds of scores in the order of the columns; "greedy" also stands for scores without a search."""


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
    """Format the table of one task: a heading, then a row for each group; empty columns are left out."""
    wanted = [
        (metric, kind)
        for metric in METRICS
        for kind in KINDS
        if any(group.values(kind, metric) for group in members) and (metric.key != "loss" or kind == "running")
    ]
    head = ["norm", "seeds", *(f"{metric.name} {KINDS[kind]}" for metric, kind in wanted)]
    lines = [[*head, "folds", "parameters", "minutes", "status"]]
    for group in members:
        scores = [_number(group, kind, metric) for metric, kind in wanted]
        first, minutes = group.results[0], interval([(r["seconds"].get("train") or 0) / 60 for r in group.results])[0]
        ended = [result["status"] for result in group.results if result["status"] != "done"]
        status = (
            f"{len(ended)} of {len(group.results)} {ended[0]}" if ended and len(group.results) > 1 else ended or "done"
        )
        status = status[0] if isinstance(status, list) else status
        row = [group.label, str(len(group.results)), *scores, group.fold("foldable") or "-"]
        lines.append([*row, f"{first['parameters']:,}", f"{minutes:.1f}", status])
    return lines


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
        short = [[cell.replace("greedy, ", "") for cell in line] for line in lines]
        parts += [kind, align(short, right=range(1, len(lines[0]) - 1), heads=1)]
        if any("beam" in head for head in lines[0]) and short != lines:
            parts.append(
                '"calibrated" and "folded" search greedily: compare them with "greedy", not with "beam search".'
            )
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
    level = [group.label for group in scored if group is not best and is_level(best, group, kind, metric)]
    found = [
        f"Best by {metric.name} ({KINDS[kind]}): {best.label}, {_number(best, kind, metric)}; ± is a 95 % interval of "
        + ("the mean over seeds." if len(best.results) > 1 else "the sampling error of the test set, not of training.")
        + (f" Level with it: {', '.join(level)}." if level else "")
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


def is_level(a: Group, b: Group, kind: str, metric: Metric) -> bool:
    """Return True if the 95 % interval of the difference of two groups contains 0, or is not known."""
    first, second = a.values(kind, metric), b.values(kind, metric)
    less, half = difference(first, second)
    if math.isnan(half):
        half = math.hypot(a.error(kind, metric), b.error(kind, metric))
    return not abs(less) > half


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
