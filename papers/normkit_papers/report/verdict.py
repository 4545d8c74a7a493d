"""Conclusions from results, as sentences with their numbers."""

import math
from typing import Any, NamedTuple

from normkit.text import escape, truncate
from normkit_papers.report.seeds import CONFIDENT
from normkit_papers.report.settings import Result, Results, groups, job, labels, split
from normkit_papers.tasks import METRICS, Metric

BUCKETED = ("g2p", "mt")
ERRORS = 2  # sampling errors from which on a difference counts
EXPECTED = {"name", "command", "model.norm", "model.norm_at", "model.fixnorm"}
HUNDREDTH = 0.01
SAME_LENGTHS = "other items of the same lengths"


class Score(NamedTuple):
    """A score and its sampling error, if known; for several seeds, the error of their mean."""

    value: float
    error: float | None
    pooled: bool = False

    def text(self) -> str:
        """The score, with its 95 % interval if it is a mean over seeds."""
        digits = 3 if abs(self.value) < 1 else 1
        interval = "" if not self.pooled or self.error is None else f" \u00b1 {CONFIDENT * self.error:.{digits}f}"
        return f"{self.value:.{digits}f}{interval}"


def sentences(results: Results) -> list[str]:
    """Compare the norms, and state the cost of their running statistics.

    Scores are those with running statistics, as in use. Two scores differ if they are more than two sampling errors of
    their difference apart; so do the scores of one model with different statistics. Of results that
    `normkit_papers.report.seeds.pool` has made, the errors are those of means over seeds.
    """
    names = labels(results)
    kinds = groups(results)
    found = []
    for kind in kinds:
        lead = f"{' on '.join(job(next(iter(kind.values()))))}: " if len(kinds) > 1 else ""
        found += [escape(lead + sentence) for sentence in _group(kind, names)]
    return found


def _group(results: Results, names: dict[Any, str]) -> list[str]:
    metric = _metric(results)
    sentences = []
    if metric is not None:
        running = {folder: score for folder, r in results.items() if (score := _score(r, "running", metric))}
        sentences += _terms(metric, results)
        sentences += _ranking(metric, running, names)
        sentences += _statistics(metric, results, names)
    for folder, result in results.items():
        sentences += _ending(result, names[folder])
        sentences += _folding(metric, result, names[folder])
    sentences += _mixture(results)
    return sentences


def _metric(results: Results) -> Metric | None:
    for metric in METRICS:
        if any(_score(result, "running", metric) for result in results.values()):
            return metric
    return None


def _score(result: Result, kind: str, metric: Metric) -> Score | None:
    score = result["scores"].get(kind) or {}
    value = score.get(metric.key)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    error = score.get(f"{metric.key}_error")
    if error is None and metric.key == "accuracy" and score.get("n"):
        share = min(max(value / 100, 0.0), 1.0)
        error = 100 * math.sqrt(share * (1 - share) / score["n"])
    return Score(value, error, "seeds" in result)


def _loss(a: Score, b: Score, metric: Metric) -> float:
    """The difference by which `a` is worse than `b`; 0 if it may be chance."""
    worse = (b.value - a.value) * metric.better
    margin = 0.0 if a.error is None or b.error is None else ERRORS * math.hypot(a.error, b.error)
    return worse if worse > margin else 0.0


def _terms(metric: Metric, results: Results) -> list[str]:
    """The basis of the scores: number of test items, sampling errors, and common settings."""
    scores = [score for r in results.values() if (score := r["scores"].get("running"))]
    errors = [score.error for r in results.values() if (score := _score(r, "running", metric)) and score.error]
    common, _ = split([result["run"] for result in results.values()])
    terms = [f"{n:,} test items" for n in {score.get("n") for score in scores} if n]
    seeds = sorted({result.get("seeds", 1) for result in results.values()})
    if seeds[-1] > 1:
        terms.append(f"means over {'-'.join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))} seeds with 95 % intervals")
    elif errors:
        terms.append(f"sampling error of {metric.name} {_span(errors)}")
    terms += [f"{common['steps']:,} steps"] if "steps" in common else []
    if "bucketing" in common and common.get("task") in BUCKETED:
        terms.append("batches bucketed by length" if common["bucketing"] else "batches of any lengths, not bucketed")
    terms += [f"seed {common['seed']}"] if "seed" in common else []
    return [f"{', '.join(terms)}."] if terms else []


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.2g}", f"{max(values):.2g}"
    return low if low == high else f"{low} to {high}"


def _ranking(metric: Metric, scores: dict[Any, Score], names: dict[Any, str]) -> list[str]:
    ranked = sorted(scores, key=lambda folder: -metric.better * scores[folder].value)
    if len(ranked) < 2:
        return [f"{names[folder]}: {metric.name} {scores[folder].text()}." for folder in ranked]
    first, *others = ranked
    top = scores[first]
    behind = [folder for folder in others if _loss(scores[folder], top, metric)]
    equal = [folder for folder in others if folder not in behind]
    known = all(score.error is not None for score in scores.values())
    pooled = any(score.pooled for score in scores.values())
    same = "within the intervals" if pooled else "within sampling error of it" if known else "equal"
    parts = [f"Best with running statistics is {names[first]}, {metric.name} {top.text()}"]
    if equal:
        parts.append(f"{same}: {_listed(equal, scores, names)}")
    if behind:
        parts.append(f"behind: {_listed(behind, scores, names)}")
    if not known:
        parts.append("no sampling error is known, so that a small difference may be chance")
    return ["; ".join(parts) + "."]


def _statistics(metric: Metric, results: Results, names: dict[Any, str]) -> list[str]:
    sentences, holding = [], []
    for folder, result in results.items():
        running, donors = _score(result, "running", metric), _score(result, "donors", metric)
        if running is None or donors is None:
            continue
        cost = _loss(running, donors, metric)
        if not cost:
            holding.append(f"{names[folder]} ({running.text()} against {donors.text()})")
            continue
        text = (
            f"{names[folder]} loses by its running statistics: {metric.name} {running.text()}, "
            f"against {donors.text()} with those of {SAME_LENGTHS}"
        )
        calibrated = _score(result, "calibrated", metric)
        if calibrated is not None:
            text += f"; calibration {_repair(running, calibrated, cost, metric)}"
        sentences.append(text + ".")
    if holding:
        sentences.append(
            f"Running statistics lose nothing beyond sampling error against those of {SAME_LENGTHS}: {_and(holding)}."
        )
    return sentences


def calibration_repair(result: Result) -> tuple[float, str] | None:
    """The part of the loss by running statistics that calibration repairs, and its scores.

    The loss is against the scores of donors, where there are any. None if nothing was lost, or calibration was not
    scored.
    """
    metric = _metric({"": result})
    if metric is None:
        return None
    running, donors, calibrated = (_score(result, kind, metric) for kind in ("running", "donors", "calibrated"))
    best = calibrated if donors is None else donors
    if running is None or best is None or calibrated is None or not (cost := _loss(running, best, metric)):
        return None
    gained = (calibrated.value - running.value) * metric.better
    text = f"{metric.name} {running.text()}, {calibrated.text()} calibrated"
    return gained / cost, text if donors is None else f"{text}, {donors.text()} with those of {SAME_LENGTHS}"


def _repair(running: Score, calibrated: Score, cost: float, metric: Metric) -> str:
    gained = (calibrated.value - running.value) * metric.better
    if _loss(calibrated, running, metric):
        return f"makes it worse ({calibrated.text()})"
    if gained <= 0:
        return f"does not repair it ({calibrated.text()})"
    sure = "" if _loss(running, calibrated, metric) else ", within sampling error"
    return f"repairs {100 * gained / cost:.0f}% of that ({calibrated.text()}{sure})"


def _ending(result: Result, name: str) -> list[str]:
    """The outcome of a run that did not end as planned."""
    if result["scores"]:
        if result["run"].get("average") and result.get("averaged") == 0:
            return [f"{name}: there was no checkpoint to average, so its last weights are scored."]
        return [] if result["status"] == "done" else [f"{name}: {result['status']}."]
    return [f"{name}: {result['status']}, no score."]


def _folding(metric: Metric | None, result: Result, name: str) -> list[str]:
    fold, timing = result.get("fold") or {}, result.get("timing") or {}
    sentences = []
    if fold.get("max_error") is not None and fold.get("foldable"):
        text = f"{name} folded: {fold['foldable']} norms are gone, outputs differ by at most {fold['max_error']:.0e}"
        before = metric and _score(result, "running", metric)
        after = metric and _score(result, "folded", metric)
        if metric and before and after:
            same = "unchanged" if abs(after.value - before.value) < HUNDREDTH else f"before {before.text()}"
            text += f", {metric.name} {after.text()} ({same})"
        sentences.append(text + ".")
    if timing.get("obstacle"):
        return [*sentences, f"Speed was not compared: {timing['obstacle']}."]
    for pair in timing.get("pairs") or []:
        sentences.append(f"{pair['a']} takes {pair['ratio']:.2f} of the time of {pair['b']}{_speed(pair)}.")
    return sentences


def _speed(pair: dict[str, Any]) -> str:
    span = f" ({pair['low']:.2f} to {pair['high']:.2f} in {pair['n']} turns)"
    if pair["low"] <= 1 <= pair["high"]:
        return f"{span}: no clear difference"
    return f"{span}: {'slower' if pair['ratio'] > 1 else 'faster'}"


def _mixture(results: Results) -> list[str]:
    """A warning if runs of one table differ in more than their norms."""
    _, different = split([result["run"] for result in results.values()])
    more = [
        f"{name} ({', '.join(map(str, dict.fromkeys(map(str, v))))})"
        for name, v in different.items()
        if name not in EXPECTED and (name != "seed" or None not in v)  # pooled seeds are None
    ]
    return [f"Mind that the runs differ in more than their norms: {'; '.join(more)}."] if more else []


def _listed(folders: list[Any], scores: dict[Any, Score], names: dict[Any, str]) -> str:
    return ", ".join(truncate([f"{names[folder]} {scores[folder].text()}" for folder in folders]))


def _and(names: list[str]) -> str:
    names = truncate(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
