"""Metrics of studies: what a table shows of a run, and in which fields of the CSV it stands."""

import re
import statistics
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from normkit.watch import QUANTITIES, Recording
from normkit_papers.tasks import ACCURACY, BLEU, LOSS, PER, PERPLEXITY, perplexity

SKIPPED_START = 0.1  # statistics over a run leave out this first part of it
DECODER = r"decoder\.layers\.\d+\.(?!cross_norm)"  # norms of its layers, but those of decoder-encoder attention

Summary = Callable[[Recording, int], float | None]
"""Computes a number from what a run recorded, and its last step; None if the run did not record it."""


class StudyMetric(NamedTuple):
    """One number of a run: the first of these fields of the CSV that it has.

    `better` is the sign of a gain, or 0. A `summary` fills the field from recorded statistics when a run has ended.
    `meaning` explains what is no well-known score.
    """

    fields: tuple[str, ...]
    better: int = 0
    digits: int = 1
    summary: Summary | None = None
    meaning: str = ""

    def value(self, row: Mapping[str, Any]) -> float | None:
        """Return the number in a row of a CSV.

        >>> STUDY_METRICS["per"].value({"per running": "11.0", "per beam": ""})
        11.0
        """
        return next((float(row[field]) for field in self.fields if row.get(field) not in (None, "")), None)


def validation_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Compute the metrics that need the losses during training, as they are called in a CSV."""
    valid, curve, found = result["valid"], result["curve"], dict[str, float]()
    last = max((point["step"] for point in curve), default=result["run"]["steps"])  # patience may end a run early
    if scores := [point["bleu"] for point in valid if "bleu" in point]:
        found["bleu valid"] = max(scores)
    if valid:
        found["perplexity valid"] = perplexity(valid[-1]["loss"])
    if late := [point["train_loss"] for point in curve if point["step"] > 0.95 * last]:
        found["perplexity train"] = perplexity(statistics.fmean(late))  # with label smoothing
    return found


OF_MODEL = ("loss", "constant_loss", "gradient_norm")  # quantities of the whole model


def _over_run(quantity: str, summarize: Callable[[list[float]], float], every: bool = False) -> Summary:
    """Summarize a quantity over the run, without its start: of its first norm, or of all sites."""

    def summary(recording: Recording, last: int) -> float | None:
        series = list(recording.of(quantity).values())[: None if every else 1]
        values = [value for each in series for step, value in each.points() if step > SKIPPED_START * last]
        return summarize(values) if values else None

    return summary


def _largest_over_median(values: list[float]) -> float:
    return max(values) / max(statistics.median(values), 1e-30)


def _singular_value(recording: Recording, last: int) -> float | None:
    """Read a singular value of the first embedding, a tenth of the way down from the largest, which is 1."""
    indices = [int(name[15:-1]) for name in recording.quantities if name.startswith("singular_value[")]
    if not indices:
        return None
    site = next(iter(recording.of("singular_value[0]")), "")
    nearest = recording.of(f"singular_value[{min(indices, key=lambda index: abs(index - max(indices) / 10))}]")
    return nearest[site].values[0] if site in nearest else None


def _similarity(part: int) -> Summary:
    """Average the CKA of equal layers of two models, over the first `1 / part` of them."""

    def summary(recording: Recording, last: int) -> float | None:
        pairs = {site: series.values[-1] for site, series in recording.of("cka").items()}
        same = [value for site, value in pairs.items() if len(set(site.split("|"))) == 1]
        return statistics.fmean(same[: max(1, len(same) // part)]) if same else None

    return summary


def _by_depth(quantity: str, sites: str, deep: bool) -> Summary:
    """Average the last values of a quantity over the shallow or the deep half of some sites."""

    def summary(recording: Recording, last: int) -> float | None:
        found = [series.values[-1] for site, series in recording.of(quantity).items() if re.search(sites, site)]
        half = len(found) // 2
        return statistics.fmean(found[-half:] if deep else found[:half]) if half else None

    return summary


def _dropped(late: bool) -> Summary:
    """Average the steps that filtration dropped in the first or second half after the warm-up."""

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


KINDS = {"": ("beam", "running"), " running": ("running",), " calibrated": ("calibrated", "running")}
"""Kinds of test scores by the suffix of the metric's name; beam search counts where a task has one."""
SIZES = {"": "", "50": "50", "75": "75", "s": "_small", "m": "_medium", "l": "_large"}
"""Suffixes of average precision in COCO's tables, and those in result files."""

SUMMARIES: dict[str, tuple[Summary, str]] = {
    "singular value": (_singular_value, "singular value a tenth of the way down, of a largest of 1"),
    "g shallow": (_by_depth("learned_g", DECODER, deep=False), "mean learned g of the first half of the decoder"),
    "g deep": (_by_depth("learned_g", DECODER, deep=True), "mean learned g of its second half"),
    "g output": (_output_g, "learned g of the decoder's last norm"),
    "filtered shallow": (_by_depth("filtered", "", deep=False), "dropped steps, mean over the first half of the norms"),
    "filtered deep": (_by_depth("filtered", "", deep=True), "the same over the second half"),
    "filtered early": (_dropped(late=False), "dropped steps in the first half after the warm-up, mean over norms"),
    "filtered late": (_dropped(late=True), "the same in the second half"),
    "cka": (_similarity(1), "similarity of equal layers of two models (CKA, at most 1), mean over layers"),
    "cka shallow": (_similarity(3), "the same over the first third of the layers"),
}
"""Metrics of recorded statistics at the end of a run, and what they mean, by name."""

STUDY_METRICS: dict[str, StudyMetric] = {
    **{
        f"{metric.key}{suffix}": StudyMetric(tuple(f"{metric.key} {kind}" for kind in kinds), metric.better)
        for metric in (BLEU, PER, PERPLEXITY, ACCURACY, LOSS)
        for suffix, kinds in KINDS.items()
    },
    **{
        f"{target} AP{suffix}": StudyMetric((f"{target}_ap{key} running",), 1)
        for target in ("box", "mask")
        for suffix, key in SIZES.items()
    },
    "perplexity smoothed": StudyMetric(("smoothed_perplexity running",), -1, 3),
    "bleu valid": StudyMetric(("bleu valid",), 1),
    "perplexity valid": StudyMetric(("perplexity valid",), -1),
    "perplexity train": StudyMetric(("perplexity train",), -1, 3),
    "memory": StudyMetric(("memory",), -1, 0, meaning="peak MB allocated at inference"),
    "speed": StudyMetric(("speed",), 1, meaning="items per second at inference"),
    **{
        name: StudyMetric((name,), int(name.startswith(("singular", "cka"))), 3, summary, meaning)
        for name, (summary, meaning) in SUMMARIES.items()
    },
    **{
        f"{name}{suffix}": StudyMetric(
            (f"{name}{suffix}",),
            0,
            digits,
            _over_run(name, summarize, every),
            f"{quantity.definition}; {over.format('' if name in OF_MODEL else ', first norm')}",
        )
        for name, quantity in QUANTITIES.items()
        for suffix, summarize, every, digits, over in (
            ("", statistics.median, False, 4, "median over the run{}"),
            (" outliers", _largest_over_median, False, 1, "its largest value over the run by its median{}"),
            (" anywhere", max, True, 3, "largest over the run and all norms"),
        )
    },
}
"""Metrics by name, as in `Column.metric`."""
