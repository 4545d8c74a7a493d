"""Metrics of studies: numbers from a run's scores, losses and recorded statistics."""

import functools
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from normkit.watch import QUANTITIES, Recording, read_run
from normkit.watch.row_files import FILE
from normkit_papers.tasks import ACCURACY, BLEU, LOSS, PER, PERPLEXITY, perplexity
from normkit_papers.train.donor_kinds import DONORS

Result = Mapping[str, Any]
Reader = Callable[[Path, Result], float | None]
SKIPPED_START = 0.1  # statistics over a run leave out this first part of it


class StudyMetric(NamedTuple):
    """One number of a run.

    Attributes:
        about: Definition, with unit.
        read: Takes the run's folder and result and returns the number; None if the run has none.
        better: 1 if higher is better, -1 if lower is better, 0 if neither.
        digits: Digits shown after the decimal point.
        error: Sampling error of one run's number, read the same way.
        kind: Kind of test scores, if it is one of these.
    """

    about: str
    read: Reader
    better: int = 0
    digits: int = 1
    error: Reader = lambda folder, result: None
    kind: str = ""


def score(name: str, *kinds: str) -> Reader:
    """Read a test score, of the first kind that exists.

    Kind "running" stands in for beam search where a task has none, and for all kinds of statistics where the norm has
    none.

    >>> result = {"scores": {"running": {"per": 11.0}, "beam": {"per": 10.5}}}
    >>> score("per", "beam")(Path(), result), score("per", "calibrated")(Path(), result)
    (10.5, 11.0)
    """

    def read(folder: Path, result: Result) -> float | None:
        scores = result["scores"]
        same = "calibrated" not in scores or not kinds or "beam" in kinds
        allowed = (*kinds, "running") if same else kinds
        return next((scores[kind][name] for kind in allowed if name in (scores.get(kind) or {})), None)

    return read


def _score(about: str, name: str, *kinds: str, better: int, digits: int = 1) -> StudyMetric:
    return StudyMetric(about, score(name, *kinds), better, digits, score(f"{name}_error", *kinds), *kinds[:1])


def _best_valid(name: str) -> Reader:
    return lambda folder, result: max((v[name] for v in result["valid"] if name in v), default=None)


def _minutes_to(name: str, target: float) -> Reader:
    """Training time until a validation pass reaches the target, assuming equally long steps."""

    def read(folder: Path, result: Result) -> float | None:
        reached = [valid["step"] for valid in result["valid"] if valid.get(name, 0.0) >= target]
        return result["seconds"]["train"] / 60 * reached[0] / _last_step(result) if reached else None

    return read


def _last_step(result: Result) -> int:
    """Last step trained; patience may end a run before its configured last step."""
    return max((point["step"] for point in result["curve"]), default=result["run"]["steps"])


def _valid_perplexity(folder: Path, result: Result) -> float | None:
    return perplexity(result["valid"][-1]["loss"]) if result["valid"] else None


def _train_perplexity(folder: Path, result: Result) -> float | None:
    last = [point["train_loss"] for point in result["curve"] if point["step"] > 0.95 * _last_step(result)]
    return perplexity(statistics.fmean(last)) if last else None


def recorded(quantity: str, summary: Callable[[list[float]], float], all_sites: bool = False) -> Reader:
    """Summarize a recorded quantity over the run: of its first norm, or of all sites."""

    def read(folder: Path, result: Result) -> float | None:
        series = list(_recording(folder).of(quantity).values())
        start = SKIPPED_START * _last_step(result)
        pairs = [pair for s in series[: None if all_sites else 1] for pair in s.points()]
        values = [value for step, value in pairs if step > start]
        return summary(values) if values else None

    return read


def _singular_value(folder: Path, result: Result) -> float | None:
    """A singular value of the first embedding, a tenth of the way down from the largest."""
    prefix, recording = "singular_value[", _recording(folder)
    indices = [int(name[len(prefix) : -1]) for name in recording.quantities if name.startswith(prefix)]
    if not indices:
        return None
    nearest = min(indices, key=lambda index: abs(index - max(indices) / 10))
    series = recording.of(f"{prefix}{nearest}]")
    return series[site].values[0] if (site := next(iter(recording.of(f"{prefix}0]")), "")) in series else None


def _similarity(part: int) -> Reader:
    """Read the mean CKA of equal layers of two models, over the first `1 / part` of them."""

    def read(folder: Path, result: Result) -> float | None:
        series = _recording(folder).of("cka")
        same = [series[site].values[-1] for site in series if len(set(site.split("|"))) == 1]
        return statistics.fmean(same[: max(1, len(same) // part)]) if same else None

    return read


def _recording(folder: Path) -> Recording:
    path = folder / FILE
    return _read_once(folder, path.stat().st_mtime_ns) if path.is_file() else Recording()


@functools.lru_cache(maxsize=8)
def _read_once(folder: Path, modified: int) -> Recording:
    """Read a run's rows; cached because several columns of a table read the same file."""
    return read_run(folder)


def _largest_over_median(values: list[float]) -> float:
    return max(values) / max(statistics.median(values), 1e-30)


def _of_quantity(name: str, definition: str) -> dict[str, StudyMetric]:
    """Metrics of a recorded quantity."""
    return {
        name: StudyMetric(f"{definition}: first norm, median over the run", recorded(name, statistics.median), 0, 4),
        f"{name} max": StudyMetric(f"{definition}: first norm, largest over the run", recorded(name, max), 0, 4),
        f"{name} outliers": StudyMetric(
            f"{definition}: first norm, largest / median", recorded(name, _largest_over_median)
        ),
        f"{name} anywhere": StudyMetric(f"{definition}: largest over run and norms", recorded(name, max, True), 0, 3),
    }


KINDS = {  # kinds of test scores: the suffix of the metric's name, and its description
    "": ("beam", "by beam search where the task has one"),
    " running": ("running", "without beam search, running statistics"),
    " calibrated": ("calibrated", "without beam search, statistics recalibrated after training"),
    **{f" {kind}": (kind, f"without beam search, statistics {donor.about}") for kind, donor in DONORS.items()},
    " batch": ("batch", "without beam search, statistics of each test batch itself, by its right answers"),
}
AVERAGE_PRECISION = {  # suffix in COCO's tables: suffix in result files, and the description
    "": ("", ""),
    "50": ("50", " at 50% overlap"),
    "75": ("75", " at 75% overlap"),
    "s": ("_small", " of small objects"),
    "m": ("_medium", " of medium objects"),
    "l": ("_large", " of large objects"),
}
STUDY_METRICS: dict[str, StudyMetric] = {
    **{
        f"{metric.key}{suffix}": _score(f"{metric.about}, {about}", metric.key, kind, better=metric.better)
        for metric in (BLEU, PER, PERPLEXITY, ACCURACY, LOSS)
        for suffix, (kind, about) in KINDS.items()
    },
    "bleu valid": StudyMetric("best BLEU on the validation split", _best_valid("bleu"), 1),
    "perplexity valid": StudyMetric("perplexity on the validation split at the end", _valid_perplexity, -1),
    "perplexity train": StudyMetric("perplexity with label smoothing, last 5% of training", _train_perplexity, -1, 3),
    **{f"symbols {kind}": _score("symbols of an output", "symbols", kind, better=0) for kind in DONORS},
    "perplexity smoothed": _score("perplexity with label smoothing, test", "smoothed_perplexity", better=-1, digits=3),
    "minutes to 80%": StudyMetric("minutes of training to 80% validation accuracy", _minutes_to("accuracy", 80.0), -1),
    **{
        f"{target} AP{suffix}": _score(f"average precision of {target}{about}", f"{target}_ap{key}", better=1)
        for target in ("box", "mask")
        for suffix, (key, about) in AVERAGE_PRECISION.items()
    },
    "memory": StudyMetric("peak MB allocated at inference", lambda _, r: r["speed"].get("inference_megabytes"), -1, 0),
    "speed": StudyMetric("items per second at inference", lambda _, r: r["speed"].get("inference_items_per_s"), 1),
    "singular value": StudyMetric("of the embedding, a tenth of the way down; the largest is 1", _singular_value, 1, 3),
    "cka": StudyMetric("similarity (CKA) of each layer with the same one of the first row, mean", _similarity(1), 1, 3),
    "cka shallow": StudyMetric("the same, mean over the first third of the layers", _similarity(3), 1, 3),
    **{
        name: metric
        for quantity, one in QUANTITIES.items()
        for name, metric in _of_quantity(quantity, one.definition).items()
    },
}
"""Metrics by name, as in `Column.metric`."""
