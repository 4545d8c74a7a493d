"""One rule a fault: what is seen in the rows, where, by which numbers, and what helps."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from normkit.watch.series import Series, Table, freezes_quadratic_means, keeps_batch_statistics, middle, places


class Threshold(NamedTuple):
    """A number that decides, and what it decides."""

    value: float
    meaning: str


THRESHOLDS: dict[str, Threshold] = {
    "gap": Threshold(0.25, "gap at evaluation, of the output's own size, above which frozen batch statistics fail"),
    "gap_holds": Threshold(0.15, "gap up to which a norm by quadratic means is said to hold"),
    "steps": Threshold(20, "steps before which running statistics still show where they began: no gap is judged"),
    "padding": Threshold(0.01, "share of padding among the rows of a norm with batch statistics"),
    "tokens": Threshold(32, "rows of a batch below which its statistics are mostly chance"),
    "filtered_rate": Threshold(0.5, "share of steps that outlier filtration drops, above which UN is PN-V"),
    "Gamma": Threshold(1.0, "Gamma over its bound, above which nu grows"),
    "nu": Threshold(1e3, "growth of ||nu|| over its median, which is divergence"),
    "depth": Threshold(30.0, "rms of the last norm's input over the first one's"),
    "growth": Threshold(30.0, "rms of a norm's input at the end over its start"),
    "largest": Threshold(6e4, "largest magnitude, near where float16 ends (65504)"),
    "dead": Threshold(0.05, "share of dead channels"),
    "spike": Threshold(20.0, "gradient norm over its median"),
    "lose": Threshold(0.1, "evaluation loss over training-mode loss, less 1"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: its kind, where, in words, and the numbers that say so."""

    kind: str
    where: tuple[str, ...]
    says: str
    evidence: Mapping[str, float]

    def __str__(self) -> str:
        return self.says


def bad_batches(table: Table) -> list[Finding]:
    """Batches that were not finite, as norms counted them or as they were seen; statistics that one has spoilt."""
    found = []
    for quantity, what in (("skipped", "forwards"), ("skipped_grad", "backwards")):
        hit = {site: series.top() for site, series in table.get(quantity, {}).items() if series.top() > 0}
        if hit:
            says = (
                f"{places(hit)}: {max(hit.values()):.0f} {what} were not finite or all padding and moved no statistics:"
                " look for NaN or infinity in the data, then lower the learning rate"
            )
            found.append(Finding("nan", tuple(hit), says, hit))
    bad = {site: series.top() for site, series in table.get("nonfinite", {}).items() if series.top() > 0}
    if bad:
        when = min(_first(table["nonfinite"][site], lambda value: value > 0) for site in bad)
        says = f"{places(bad)}: values that are not finite, first seen at step {when}: a NaN batch, or a diverged run"
        found.append(Finding("nan", tuple(bad), says, {**bad, "step": when}))
    gaps = {**table.get("gap_quadratic", {}), **table.get("gap_batch", {})}
    last = {site: series.values[-1] for site, series in table.get("nonfinite", {}).items()}
    spoilt = {s: x.values[-1] for s, x in gaps.items() if not math.isfinite(x.values[-1]) and last.get(s) == 0}
    if spoilt:
        says = (
            f"{places(spoilt)}: running statistics are not finite though the last batch is: a NaN batch went into"
            " them, and evaluation gives NaN; load an earlier checkpoint, or calibrate"
        )
        found.append(Finding("nan", tuple(spoilt), says, spoilt))
    gradients = table.get("gradient_norm", {}).get("")
    if gradients and not found and not all(map(math.isfinite, gradients.values)):
        when = _first(gradients, lambda value: not math.isfinite(value))
        found.append(Finding("nan", ("",), f"the gradient is not finite, first seen at step {when}", {"step": when}))
    return found


def warming(table: Table) -> list[Finding]:
    """Statistics that the run has not begun to use."""
    left = {site: series.values[-1] for site, series in table.get("warmup_left", {}).items() if series.values[-1] > 0}
    if not left:
        return []
    says = (
        f"{places(left)}: so far trained with each batch's own statistics, and for {max(left.values()):.0f} more steps;"
        " evaluation takes the running ones: in a run that ends before, give the norm a shorter warmup="
    )
    return [Finding("warm-up", tuple(left), says, left)]


def padding(table: Table) -> list[Finding]:
    """Padding among the rows that statistics are taken over."""
    hit = _over(table, "padding", "padding")
    if not hit:
        return []
    says = (
        f"{places(hit)}: {100 * max(hit.values()):.0f} % of the rows that the statistics are taken over are padding:"
        " pass the norm its mask (convert(..., mask_from=...))"
    )
    return [Finding("padding", tuple(hit), says, hit)]


def tiny_batches(table: Table) -> list[Finding]:
    """Too few rows for statistics."""
    counts = {s: x.middle() for s, x in table.get("tokens", {}).items() if keeps_batch_statistics(x.norm)}
    hit = {site: count for site, count in counts.items() if count < THRESHOLDS["tokens"].value}
    if not hit:
        return []
    says = (
        f"{places(hit)}: batches of {min(hit.values()):.0f} rows, too few for statistics: larger batches,"
        " steps_per_update=k, sync=True over processes, or a norm of tokens"
    )
    return [Finding("tiny batches", tuple(hit), says, hit)]


def evaluation(table: Table) -> list[Finding]:
    """Running means and variances that do not stand for the batches."""
    groups: dict[str, dict[str, float]] = {}
    for site, gap in _over(table, "gap_batch", "gap").items():
        if not freezes_quadratic_means(table["gap_batch"][site].norm):
            groups.setdefault(_alternative(middle(table, "gap_quadratic", site)), {})[site] = gap
    return [
        Finding(
            "evaluation",
            tuple(hit),
            f"{places(hit)}: batch variance strays {_stray(table, 'stray_var', hit)} from its running value, the mean"
            f" {_worst(table, 'stray_mean', hit)} standard deviations: BatchNorm will fail at evaluation here"
            f" (off by {100 * max(hit.values()):.0f} %)" + ending.format(_stray(table, "stray_quadratic", hit)),
            hit,
        )
        for ending, hit in groups.items()
    ]


def evaluation_quadratic(table: Table) -> list[Finding]:
    """Running quadratic means that do not stand for the batches."""
    over = _over(table, "gap_quadratic", "gap")
    hit = {site: gap for site, gap in over.items() if freezes_quadratic_means(table["gap_quadratic"][site].norm)}
    if not hit:
        return []
    says = (
        f"{places(hit)}: quadratic mean strays {_stray(table, 'stray_quadratic', hit)} from its running value: the norm"
        f" will fail at evaluation (off by {100 * max(hit.values()):.0f} %); mix the batches better, calibrate, or keep"
        " a norm of tokens here"
    )
    return [Finding("evaluation", tuple(hit), says, hit)]


def _alternative(quadratic: float) -> str:
    """What to take instead of BatchNorm, by the gap of quadratic means."""
    if math.isnan(quadratic):
        return "; what a quadratic mean would do was not recorded (gap_quadratic)"
    if quadratic <= THRESHOLDS["gap_holds"].value:
        return "; quadratic mean strays {}: PN-V or UN will hold"
    return "; quadratic mean strays {} too: keep a norm of tokens"


def train_eval(table: Table) -> list[Finding]:
    """A loss that is larger with running statistics than with the batches'."""
    train, ev = (table.get(f"loss_{mode}_mode", {}).get("") for mode in ("train", "eval"))
    if train is None or ev is None or ev.values[-1] <= (1 + THRESHOLDS["lose"].value) * train.values[-1]:
        return []
    says = (
        f"the loss is {ev.values[-1]:.3g} at evaluation and {train.values[-1]:.3g} with the batches' own statistics:"
        " running statistics do not stand for the data; calibrate the model"
    )
    return [Finding("train-to-eval gap", ("",), says, {"train": train.values[-1], "eval": ev.values[-1]})]


def nu(table: Table) -> list[Finding]:
    """PowerNorm's gradient statistic, growing from step to step."""
    hit = {}
    for site, series in table.get("Gamma", {}).items():
        bound = table.get("Gamma_bound", {}).get(site)
        if bound is not None and series.middle() > THRESHOLDS["Gamma"].value * bound.values[-1]:
            hit[site] = series.middle() / bound.values[-1]
    for site, series in table.get("nu", {}).items():
        values = [value for value in series.values if math.isfinite(value) and value > 0]
        if values and max(values) > THRESHOLDS["nu"].value * statistics.median(values):
            hit.setdefault(site, max(values) / statistics.median(values))
    if not hit:
        return []
    says = (
        f"{places(hit)}: nu exceeds its bound ({max(hit.values()):.3g}x): PowerNorm's gradient statistic grows"
        " from step to step: raise alpha_bkw, or clamp=True"
    )
    return [Finding("nu", tuple(hit), says, hit)]


def filtered(table: Table) -> list[Finding]:
    """UN's outlier filtration, dropping most steps."""
    hit = _over(table, "filtered_rate", "filtered_rate", lambda series: series.values[-1])
    if not hit:
        return []
    says = (
        f"{places(hit)}: UN filters {100 * max(hit.values()):.0f} % of steps: it is PN-V now;"
        ' threshold="scalar", a longer window, or outlier_filtration=False'
    )
    return [Finding("filtered", tuple(hit), says, hit)]


def exploding_depth(table: Table) -> list[Finding]:
    """Inputs that grow over the layers."""
    levels = {site: series.middle() for site, series in table.get("rms", {}).items() if series.late()}
    if len(levels) < 2:
        return []
    first, (last, top) = next(iter(levels.values())), max(levels.items(), key=lambda pair: pair[1])
    if not top > THRESHOLDS["depth"].value * first > 0:
        return []
    says = (
        f"{places([last])}: what enters is {top / first:.3g}x as large as at the first norm: exploding depth;"
        " normalize before each sublayer, or scale down the residual branches"
    )
    return [Finding("exploding depth", (last,), says, {last: top / first})]


def exploding(table: Table) -> list[Finding]:
    """Inputs that grow over the run."""
    rms = {s: x for s, x in table.get("rms", {}).items() if x.late() and 0 < x.values[0] < math.inf}
    grown = {site: series.middle() / series.values[0] for site, series in rms.items()}
    grown = {site: factor for site, factor in grown.items() if factor > THRESHOLDS["growth"].value}
    if not grown:
        return []
    says = f"{places(grown)}: the input grew {max(grown.values()):.3g}x during the run: lower the learning rate"
    return [Finding("exploding", tuple(grown), says, grown)]


def large_values(table: Table) -> list[Finding]:
    """Inputs out of float16."""
    large = {site: series.top() for site, series in table.get("largest", {}).items()}
    large = {site: value for site, value in large.items() if value > THRESHOLDS["largest"].value}
    if not large:
        return []
    says = f"{places(large)}: values up to {max(large.values()):.3g}: float16 ends at 65504, use bfloat16 or float32"
    return [Finding("large values", tuple(large), says, large)]


def dead_channels(table: Table) -> list[Finding]:
    """Channels that are zero in all tokens of a batch."""
    numbers = {site: series.middle() for site, series in table.get("dead", {}).items()}
    hit = {site: share for site, share in numbers.items() if share > THRESHOLDS["dead"].value}
    if not hit:
        return []
    says = f"{places(hit)}: {100 * max(hit.values()):.0f} % of the channels are dead: zero in every token of a batch"
    return [Finding("dead channels", tuple(hit), says, hit)]


def gradient_spikes(table: Table) -> list[Finding]:
    """Single gradients far above the median."""
    series = table.get("gradient_norm", {}).get("")
    late = series.late() if series else []
    if not late or not max(late) > THRESHOLDS["spike"].value * statistics.median(late):
        return []
    factor = max(late) / max(statistics.median(late), 1e-38)
    says = (
        f"the gradient spikes to {factor:.3g}x its median: clip it, warm up longer, or normalize before each sublayer"
    )
    return [Finding("gradient spikes", ("",), says, {"": factor})]


def _over(
    table: Table, quantity: str, limit: str, number: Callable[[Series], float] = Series.middle
) -> dict[str, float]:
    """The sites with batch statistics of their own where a quantity is above a threshold, and by how much it shows."""
    numbers = {
        s: number(series) for s, series in table.get(quantity, {}).items() if keeps_batch_statistics(series.norm)
    }
    return {site: value for site, value in numbers.items() if value > THRESHOLDS[limit].value}


def _first(series: Series, is_bad: Callable[[float], bool]) -> int:
    """The first step whose value is bad."""
    return next(step for step, value in zip(series.steps, series.values, strict=True) if is_bad(value))


def _worst(table: Table, quantity: str, sites: Iterable[str]) -> str:
    numbers = [value for site in sites if not math.isnan(value := middle(table, quantity, site))]
    return f"{max(numbers):.3g}" if numbers else "(not recorded)"


def _stray(table: Table, quantity: str, sites: Iterable[str]) -> str:
    worst = _worst(table, quantity, sites)
    return worst if worst.startswith("(") else f"{worst}x"
