"""Numbers that a study reads off a finished run: scores of its result, statistics that it recorded."""

import csv
import functools
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

Result = Mapping[str, Any]
SETTLED = 0.1  # the first part of a run, which statistics over its length leave out


class Metric(NamedTuple):
    """A number of a run: how to read it from its folder and its result (None where there is none), and digits shown."""

    about: str
    read: Callable[[Path, Result], float | None]
    better: int = 0
    """1 where more is better, -1 where less is."""
    digits: int = 1
    error: Callable[[Path, Result], float | None] = lambda folder, result: None
    """Sampling error of one run's number."""


def score(name: str, *kinds: str) -> Callable[[Path, Result], float | None]:
    """Reads a score by the first kind that there is; norms without statistics of batches score alike by all.

    >>> result = {"scores": {"running": {"per": 11.0}, "beam": {"per": 10.5}}}
    >>> score("per", "beam")(Path(), result), score("per", "calibrated")(Path(), result)
    (10.5, 11.0)
    """

    def read(folder: Path, result: Result) -> float | None:
        scores = result["scores"]
        for kind in (*kinds, "running"):
            if name in (scores.get(kind) or {}):
                return scores[kind][name]
        return None

    return read


def _metric(about: str, name: str, *kinds: str, better: int, digits: int = 1) -> Metric:
    return Metric(about, score(name, *kinds), better, digits, score(f"{name}_error", *kinds))


def _valid(name: str) -> Callable[[Path, Result], float | None]:
    def read(folder: Path, result: Result) -> float | None:
        return max((look[name] for look in result["valid"] if name in look), default=None)

    return read


def _minutes_to(name: str, wanted: float) -> Callable[[Path, Result], float | None]:
    """Training time at the first look at the validation split that is so good, steps taking equally long."""

    def read(folder: Path, result: Result) -> float | None:
        good = [look["step"] for look in result["valid"] if look.get(name, 0.0) >= wanted]
        return result["seconds"]["train"] / 60 * good[0] / _reached(result) if good else None

    return read


def _reached(result: Result) -> int:
    """The last step: a run may stop before those that it was given, by its patience or its learning rate."""
    return max((look["step"] for look in result["curve"]), default=result["run"]["steps"])


def _valid_perplexity(folder: Path, result: Result) -> float | None:
    losses = [look["loss"] for look in result["valid"] if math.isfinite(look["loss"])]
    return math.exp(losses[-1]) if losses else None


def _train_perplexity(folder: Path, result: Result) -> float | None:
    last = [look["train_loss"] for look in result["curve"] if look["step"] > 0.95 * _reached(result)]
    return math.exp(statistics.fmean(last)) if last else None


def recorded(
    quantity: str, summary: Callable[[list[float]], float], everywhere: bool = False
) -> Callable[[Path, Result], float | None]:
    """Reads rows.csv: a quantity of the first norm that has it (as in the papers' figures), summed up over the run."""

    def read(folder: Path, result: Result) -> float | None:
        path = folder / "rows.csv"
        if not path.is_file():
            return None
        rows = _rows(path, path.stat().st_mtime_ns).get(quantity, [])
        late = [row for row in rows if row[0] > SETTLED * _reached(result)]
        found = [value for _, site, value in late if everywhere or site == rows[0][1]]
        return summary(found) if found else None

    return read


def _singular(folder: Path, result: Result) -> float | None:
    """A singular value of the first embedding recorded at the end, a tenth of the way from the largest to the least."""
    path = folder / "rows.csv"
    rows = _rows(path, path.stat().st_mtime_ns) if path.is_file() else {}
    values = {int(name[15:-1]): found for name, found in rows.items() if name.startswith("singular_value[")}
    if not values:
        return None
    first = values[0][0][1]
    nearest = min(values, key=lambda index: abs(index - max(values) / 10))
    return next((value for _, site, value in values[nearest] if site == first), None)


@functools.lru_cache(maxsize=8)
def _rows(path: Path, stamp: int) -> dict[str, list[tuple[int, str, float]]]:
    """Step, site and value of each row by quantity; several columns of a table read the same file."""
    found: dict[str, list[tuple[int, str, float]]] = {}
    with path.open(encoding="utf8", newline="") as file:
        for row in csv.DictReader(file):
            if row["value"]:  # a run in progress may have written half a line
                found.setdefault(row["quantity"], []).append((int(row["step"]), row["site"], float(row["value"])))
    return found


def _spread(values: list[float]) -> float:
    """Largest over median: outliers."""
    return max(values) / max(statistics.median(values), 1e-30)


def _recorded(about: str, quantity: str, better: int = 0) -> dict[str, Metric]:
    return {
        quantity: Metric(f"{about}, median over the run", recorded(quantity, statistics.median), better, 4),
        f"{quantity} max": Metric(f"{about}, largest over the run", recorded(quantity, max), better, 4),
        f"{quantity} outliers": Metric(f"{about}, largest over median", recorded(quantity, _spread), better, 1),
    }


AVERAGE_PRECISION = {  # as COCO reports it, and what results call it
    "": ("", ""),
    "50": ("50", " at 50% overlap"),
    "75": ("75", " at 75% overlap"),
    "s": ("_small", " of small objects"),
    "m": ("_medium", " of medium objects"),
    "l": ("_large", " of large objects"),
}
METRICS: dict[str, Metric] = {
    "bleu": _metric("BLEU on the test split, by beam search where there is one", "bleu", "beam", better=1),
    "bleu running": _metric("BLEU, greedy search, running statistics", "bleu", "running", better=1),
    "bleu calibrated": _metric("BLEU, greedy search, statistics counted anew", "bleu", "calibrated", better=1),
    "bleu batch": _metric("BLEU, greedy search, statistics of each test batch", "bleu", "batch", better=1),
    "bleu valid": Metric("best BLEU on the validation split", _valid("bleu"), 1),
    "per": _metric("phonemes wrong in percent, by beam search where there is one", "per", "beam", better=-1),
    "per running": _metric("phonemes wrong in percent, greedy search, running statistics", "per", "running", better=-1),
    "per calibrated": _metric("the same, statistics counted anew after training", "per", "calibrated", better=-1),
    "per batch": _metric("the same, statistics of each test batch", "per", "batch", better=-1),
    "perplexity": _metric("perplexity on the test split", "perplexity", better=-1),
    "perplexity calibrated": _metric(
        "perplexity, test, statistics counted anew", "perplexity", "calibrated", better=-1
    ),
    "perplexity valid": Metric("perplexity on the validation split at the end", _valid_perplexity, -1),
    "perplexity train": Metric("perplexity with label smoothing, last 5% of the training", _train_perplexity, -1, 3),
    "perplexity smoothed": _metric("perplexity with label smoothing, test", "smoothed_perplexity", better=-1, digits=3),
    "accuracy": _metric("accuracy in percent", "accuracy", better=1),
    "accuracy calibrated": _metric(
        "the same, statistics counted anew after training", "accuracy", "calibrated", better=1
    ),
    "minutes to 80%": Metric(
        "minutes of training until 80% of the validation split", _minutes_to("accuracy", 80.0), -1
    ),
    **{
        f"{of} AP{at}": _metric(f"average precision of {of}{where}", f"{of}_ap{key}", better=1)
        for of in ("box", "mask")
        for at, (key, where) in AVERAGE_PRECISION.items()
    },
    "memory": Metric("MB allocated at most at inference", lambda _, r: r["speed"].get("inference_megabytes"), -1, 0),
    "speed": Metric("items a second at inference", lambda _, r: r["speed"].get("inference_items_per_s"), 1),
    **_recorded("distance of batch and running mean, (1/d)||.||, first norm", "distance_mean"),
    **_recorded("distance of batch and running variance, (1/d)||.||, first norm", "distance_var"),
    **_recorded("distance of batch and running quadratic mean, (1/d)||.||, first norm", "distance_quadratic"),
    **_recorded("gradient through the mean, (1/d)||g_mu||, first norm", "g_mu"),
    **_recorded("gradient through the variance, (1/d)||g_sigma2||, first norm", "g_sigma2"),
    **_recorded("gradient through the quadratic mean, (1/d)||g_psi2||, first norm", "g_psi2"),
    "gamma_over_psi": Metric(
        "largest |gamma| / psi_B of any channel of any norm",
        recorded("gamma_over_psi_max", max, everywhere=True),
        -1,
        3,
    ),
    "lipschitz": Metric("largest ratio of Lemma 2 in any norm", recorded("lipschitz", max, everywhere=True), -1, 3),
    **_recorded("norm of the whole gradient", "gradient_norm"),
    **_recorded("channels whose activation statistics look normal, percent", "pnac_activation", 1),
    **_recorded("channels whose gradient statistics look normal, percent", "pnac_gradient", 1),
    **_recorded("statistic of one channel, first norm", "channel_activation"),
    **_recorded("its arithmetic mean over the window", "channel_activation_am"),
    **_recorded("its geometric mean over the window", "channel_activation_gm"),
    **_recorded("share of steps filtered as outliers", "filtered_rate"),
    **_recorded("learned scale of the first norm", "learned_g"),
    **_recorded("similarity of feature maps (CKA)", "cka"),
    "singular value": Metric("of the embedding, a tenth of the way down; the largest is 1", _singular, 1, 3),
}
