"""Metrics of studies: what a table shows of a run, and in which fields of the CSV it stands."""

import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from normkit.watch import QUANTITIES, Recording
from normkit_papers.tasks import ACCURACY, BLEU, LOSS, PER, PERPLEXITY, perplexity

SKIPPED_START = 0.1  # statistics over a run leave out this first part of it

Summary = Callable[[Recording, int], float | None]
"""Computes a number from what a run recorded, and its last step; None if the run did not record it."""


class StudyMetric(NamedTuple):
    """One number of a run.

    Attributes:
        about: Definition, with unit.
        fields: Fields of the CSV; the first one that a run has counts.
        better: 1 if higher is better, -1 if lower is better, 0 if neither.
        digits: Digits shown after the decimal point.
        summary: Function that fills the field from recorded statistics when a run has ended.
    """

    about: str
    fields: tuple[str, ...]
    better: int = 0
    digits: int = 1
    summary: Summary | None = None

    def value(self, row: Mapping[str, Any]) -> float | None:
        """Return the number in a row of a CSV.

        >>> STUDY_METRICS["per"].value({"per running": "11.0", "per beam": ""})
        11.0
        """
        return next((float(row[field]) for field in self.fields if row.get(field) not in (None, "")), None)


def _score(name: str, about: str, *kinds: str, better: int, digits: int = 1) -> StudyMetric:
    return StudyMetric(about, tuple(f"{name} {kind}" for kind in kinds), better, digits)


def validation_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Compute the metrics that need the losses during training, as they are called in a CSV."""
    valid, curve, found = result["valid"], result["curve"], dict[str, float]()
    last = max((point["step"] for point in curve), default=result["run"]["steps"])  # patience may end a run early
    if scores := [point["bleu"] for point in valid if "bleu" in point]:
        found["bleu valid"] = max(scores)
    if valid:
        found["perplexity valid"] = perplexity(valid[-1]["loss"])
    if late := [point["train_loss"] for point in curve if point["step"] > 0.95 * last]:
        found["perplexity train"] = perplexity(statistics.fmean(late))
    if reached := [point["step"] for point in valid if point.get("accuracy", 0.0) >= 80]:
        found["minutes to 80%"] = result["seconds"]["train"] / 60 * reached[0] / last
    return found


def _recorded(name: str, about: str, quantity: str, summarize: Callable, digits: int, every: bool = False) -> dict:
    """Metric that summarizes a recorded quantity over the run: of its first norm, or of all sites."""

    def summary(recording: Recording, last: int) -> float | None:
        series = list(recording.of(quantity).values())[: None if every else 1]
        values = [value for each in series for step, value in each.points() if step > SKIPPED_START * last]
        return summarize(values) if values else None

    return {name: StudyMetric(about, (name,), 0, digits, summary)}


def _largest_over_median(values: list[float]) -> float:
    return max(values) / max(statistics.median(values), 1e-30)


def _singular_value(recording: Recording, last: int) -> float | None:
    """Read a singular value of the first embedding, a tenth of the way down from the largest."""
    prefix = "singular_value["
    indices = [int(name[len(prefix) : -1]) for name in recording.quantities if name.startswith(prefix)]
    if not indices:
        return None
    site = next(iter(recording.of(f"{prefix}0]")), "")
    nearest = recording.of(f"{prefix}{min(indices, key=lambda index: abs(index - max(indices) / 10))}]")
    return nearest[site].values[0] if site in nearest else None


def _similarity(part: int) -> Summary:
    """Average the CKA of equal layers of two models, over the first `1 / part` of them."""

    def summary(recording: Recording, last: int) -> float | None:
        pairs = {site: series.values[-1] for site, series in recording.of("cka").items()}
        same = [value for site, value in pairs.items() if len(set(site.split("|"))) == 1]
        return statistics.fmean(same[: max(1, len(same) // part)]) if same else None

    return summary


def _by_depth(quantity: str, sites: str, deep: bool) -> Summary:
    """Average the last values of a quantity over the shallow or the deep half of the sites that match a pattern."""

    def summary(recording: Recording, last: int) -> float | None:
        found = [series.values[-1] for site, series in recording.of(quantity).items() if re.search(sites, site)]
        half = len(found) // 2
        return statistics.fmean(found[-half:] if deep else found[:half]) if half else None

    return summary


def _dropped(late: bool) -> Summary:
    """Average over norms the steps that filtration dropped in the first or the second half after the warm-up."""

    def summary(recording: Recording, last: int) -> float | None:
        middle, counts = (SKIPPED_START + 1) / 2 * last, list[float]()
        for series in recording.of("filtered").values():
            early = max((value for step, value in series.points() if step <= middle), default=0.0)
            counts.append(series.values[-1] - early if late else early)
        return statistics.fmean(counts) if counts else None

    return summary


def _output_g(recording: Recording, last: int) -> float | None:
    found = recording.of("learned_g")
    return found["decoder.final_norm"].values[-1] if "decoder.final_norm" in found else None


DECODER = r"decoder\.layers\.\d+\.(?!cross_norm)"  # norms of its layers, but those of decoder-encoder attention
KINDS = {  # kinds of test scores: the suffix of the metric's name, the fields, and the description
    "": (("beam", "running"), "by beam search where the task has one"),
    " running": (("running",), "without beam search, running statistics"),
    " calibrated": (("calibrated", "running"), "without beam search, statistics recalibrated after training"),
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
        f"{metric.key}{suffix}": _score(metric.key, f"{metric.about}, {about}", *kinds, better=metric.better)
        for metric in (BLEU, PER, PERPLEXITY, ACCURACY, LOSS)
        for suffix, (kinds, about) in KINDS.items()
    },
    **{
        f"{target} AP{suffix}": _score(
            f"{target}_ap{key}", f"average precision of {target}{about}", "running", better=1
        )
        for target in ("box", "mask")
        for suffix, (key, about) in AVERAGE_PRECISION.items()
    },
    "perplexity smoothed": _score(
        "smoothed_perplexity", "perplexity with label smoothing, test", "running", better=-1, digits=3
    ),
    "bleu valid": StudyMetric("best BLEU on the validation split", ("bleu valid",), 1),
    "perplexity valid": StudyMetric("perplexity on the validation split at the end", ("perplexity valid",), -1),
    "perplexity train": StudyMetric(
        "perplexity with label smoothing, last 5% of training", ("perplexity train",), -1, 3
    ),
    "minutes to 80%": StudyMetric("minutes of training to 80% validation accuracy", ("minutes to 80%",), -1),
    "memory": StudyMetric("peak MB allocated at inference", ("memory",), -1, 0),
    "speed": StudyMetric("items per second at inference", ("speed",), 1),
    "singular value": StudyMetric(
        "of the embedding, a tenth of the way down; the largest is 1", ("singular value",), 1, 3, _singular_value
    ),
    **{
        f"{name} {half}": StudyMetric(
            f"{about}, mean over the {half} half", (f"{name} {half}",), 0, 3, _by_depth(quantity, sites, half == "deep")
        )
        for name, quantity, about, sites in (
            ("g", "learned_g", "g of the decoder's layers at the end", DECODER),
            ("filtered", "filtered", "steps dropped of each norm", ""),
        )
        for half in ("shallow", "deep")
    },
    **{
        f"filtered {half}": StudyMetric(
            f"steps dropped in the {half} half after the warm-up, mean over norms",
            (f"filtered {half}",),
            0,
            3,
            _dropped(half == "late"),
        )
        for half in ("early", "late")
    },
    "g output": StudyMetric("g of the decoder's last norm at the end", ("g output",), 0, 3, _output_g),
    "cka": StudyMetric("CKA of each layer with the same one of the first row, mean", ("cka",), 1, 3, _similarity(1)),
    "cka shallow": StudyMetric("the same over the first third of the layers", ("cka shallow",), 1, 3, _similarity(3)),
}
"""Metrics by name, as in `Column.metric`."""

for _name, _one in QUANTITIES.items():
    _what = _one.definition
    STUDY_METRICS |= {
        **_recorded(_name, f"{_what}: first norm, median over the run", _name, statistics.median, 4),
        **_recorded(f"{_name} max", f"{_what}: first norm, largest over the run", _name, max, 4),
        **_recorded(
            f"{_name} outliers", f"{_what}: first norm, largest / median over the run", _name, _largest_over_median, 1
        ),
        **_recorded(f"{_name} anywhere", f"{_what}: largest over run and norms", _name, max, 3, every=True),
    }
