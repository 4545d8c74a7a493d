"""Rules that find faults of a training run in its rows, and their thresholds."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from normkit.watch.length import target_share
from normkit.watch.recording import Recording, Series
from normkit.watch.row_names import format_sites, freezes_quadratic_means, keeps_batch_statistics, relies_on_batch

NOT_CHECKED = "not checked"
"""Kind of a finding that names checks for which the rows do not suffice."""


class Threshold(NamedTuple):
    """A number that a rule compares with, and its meaning."""

    value: float
    meaning: str


THRESHOLDS: dict[str, Threshold] = {
    "gap": Threshold(0.25, "gap at evaluation, of the output's own size, above which frozen batch statistics fail"),
    "gap_holds": Threshold(0.15, "gap up to which a norm by quadratic means holds"),
    "length_share": Threshold(0.2, "share of the variance between batches that batch length explains"),
    "target_share": Threshold(0.05, "share of target lengths, given source lengths, that differs between batches"),
    "steps": Threshold(20, "steps before which running statistics still show their initial values: no gap is judged"),
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

LIMIT_OF_GAP = THRESHOLDS["gap"].value
KEEP = "keep a per-token norm"
CALIBRATE = "calibrate the model"
IF_NOT = "; if that does not help, the batches differ from each other: mix them, or use a per-token norm"


@dataclass(frozen=True)
class Finding:
    """A fault of a run, or (kind "not checked") checks for which the rows do not suffice.

    Attributes:
        kind: Name of the fault.
        where: Sites concerned; "" is the whole model.
        message: The observation in a sentence, with its numbers.
        evidence: The numbers by site or name.
        advice: The remedy; may be empty.
    """

    kind: str
    where: tuple[str, ...]
    message: str
    evidence: Mapping[str, float]
    advice: str = ""

    def __str__(self) -> str:
        lead = f"{NOT_CHECKED}: " if self.kind == NOT_CHECKED else ""
        return lead + self.message + (f": {self.advice}" if self.advice else "")


Rule = Callable[[Recording], list[Finding]]


def by_site(
    kind: str,
    quantity: str,
    limit: float,
    message: str,
    advice: str = "",
    *,
    number: Callable[[Series], float] = Series.middle,
    applies: Callable[[str], bool] = lambda norm: True,
    below: bool = False,
) -> Rule:
    """Make a rule: a number of each norm's series must not be above (or `below`) a limit.

    Args:
        kind: Name of the fault.
        quantity: The recorded quantity.
        limit: The threshold.
        message: The observation, formatted with the worst number `{0}` and the same in percent, `{percent}`.
        advice: The remedy.
        number: The number of a series that is compared.
        applies: Which norms are judged, by their names in rows.
        below: True if numbers below the limit are the fault.
    """

    def rule(recording: Recording) -> list[Finding]:
        series = {site: each for site, each in recording.of(quantity).items() if applies(each.norm)}
        numbers = {site: number(each) for site, each in series.items()}
        hit = {site: value for site, value in numbers.items() if (value < limit if below else value > limit)}
        if not hit:
            return []
        worst = (min if below else max)(hit.values())
        text = f"{format_sites(hit)}: {message.format(worst, percent=100 * worst)}"
        return [Finding(kind, tuple(hit), text, hit, advice)]

    return rule


def last(series: Series) -> float:
    """The value of the last step."""
    return series.values[-1]


def growth(series: Series) -> float:
    """The late median over the first value; nan where they are not finite and above 0."""
    return series.middle() / series.values[0] if series.late() and 0 < series.values[0] < math.inf else math.nan


def bad_batches(recording: Recording) -> list[Finding]:
    """Find batches that were not finite, and statistics that one of them has corrupted."""
    found = []
    for quantity, passes in (("skipped", "forwards"), ("skipped_grad", "backwards")):
        message = f"{{0:.0f}} {passes} were not finite or all padding and moved no statistics"
        advice = "look for NaN or infinity in the data, then lower the learning rate"
        found += by_site("nan", quantity, 0, message, advice, number=Series.top)(recording)
    series = recording.of("nonfinite")
    bad = {site: each.top() for site, each in series.items() if each.top() > 0}
    if bad:
        step = min(_first(series[site], lambda value: value > 0) for site in bad)
        message = f"{format_sites(bad)}: values that are not finite, first seen at step {step}"
        found.append(Finding("nan", tuple(bad), message, {**bad, "step": step}, "a NaN batch, or a diverged run"))
    gaps = {
        site: each.values[-1] for name in ("gap_quadratic", "gap_batch") for site, each in recording.of(name).items()
    }
    finite = {site for site, each in series.items() if each.values[-1] == 0}
    corrupted = {site: gap for site, gap in gaps.items() if not math.isfinite(gap) and site in finite}
    if corrupted:
        message = (
            f"{format_sites(corrupted)}: running statistics are not finite though the last batch is: a NaN batch"
            " entered them, and evaluation gives NaN"
        )
        found.append(Finding("nan", tuple(corrupted), message, corrupted, "load an earlier checkpoint, or calibrate"))
    gradients = recording.of("gradient_norm").get("")
    if gradients and not found and not all(map(math.isfinite, gradients.values)):
        step = _first(gradients, lambda value: not math.isfinite(value))
        found.append(Finding("nan", ("",), f"the gradient is not finite, first seen at step {step}", {"step": step}))
    return found


def evaluation(recording: Recording) -> list[Finding]:
    """Find running means and variances that do not represent the batches."""
    groups: dict[str, dict[str, float]] = {}  # what a quadratic mean would do -> gaps
    for site, series in recording.of("gap_batch").items():
        gap, quadratic = series.middle(), recording.middle("gap_quadratic", site)
        if keeps_batch_statistics(series.norm) and not freezes_quadratic_means(series.norm) and gap > LIMIT_OF_GAP:
            holds = quadratic <= THRESHOLDS["gap_holds"].value
            unknown = "what a quadratic mean would do was not recorded (gap_quadratic)"
            advice = "PN-V or UN will hold" if holds else KEEP
            groups.setdefault(unknown if math.isnan(quadratic) else advice, {})[site] = gap
    found = []
    for advice, hit in groups.items():
        message = (
            f"{format_sites(hit)}: batch variance is {_worst(recording, 'stray_var', hit, 'x')} from its running value,"
            f" the mean {_worst(recording, 'stray_mean', hit)} standard deviations: BatchNorm will fail at evaluation"
            f" here (off by {100 * max(hit.values()):.0f} %)"
        )
        if not advice.startswith("what"):
            message += f"; quadratic mean is {_worst(recording, 'stray_quadratic', hit, 'x')} from its own"
            message += ", too" if advice == KEEP else ""
        found.append(Finding("evaluation", tuple(hit), message, hit, advice))
    return found


def evaluation_quadratic(recording: Recording) -> list[Finding]:
    """Find running quadratic means that do not represent the batches."""
    numbers = {site: series.middle() for site, series in recording.of("gap_quadratic").items()
               if freezes_quadratic_means(series.norm)}  # fmt: skip
    hit = {site: gap for site, gap in numbers.items() if gap > LIMIT_OF_GAP}
    if not hit:
        return []
    message = (
        f"{format_sites(hit)}: quadratic mean is {_worst(recording, 'stray_quadratic', hit, 'x')} from its running"
        f" value: the norm will fail at evaluation (off by {100 * max(hit.values()):.0f} %)"
    )
    return [Finding("evaluation", tuple(hit), message, hit, f"{CALIBRATE}{IF_NOT}")]


def batch_length(recording: Recording) -> list[Finding]:
    """Find statistics of each batch that tell the model how long its target is."""
    if target_share(recording) <= THRESHOLDS["target_share"].value:
        return []  # the source's length gives the target's away already, or all lengths are alike
    hit = {}
    for site, norm in recording.norms().items():
        kind = "length_share_quadratic" if freezes_quadratic_means(norm) else "length_share"
        if relies_on_batch(norm) and (share := recording.middle(kind, site)) > THRESHOLDS["length_share"].value:
            hit[site] = share
    if not hit:
        return []
    message = (
        f"{format_sites(hit)}: statistics carry the length of the batch, which explains up to"
        f" {100 * max(hit.values()):.0f} % of their variance between batches; a model can learn to read it there, and"
        " running statistics do not have it"
    )
    advice = "shuffle the batches, or use a norm by past batches (un, power); calibration does not repair it"
    return [Finding("batch length", tuple(hit), message, hit, advice)]


def train_eval(recording: Recording) -> list[Finding]:
    """Find a loss that is larger with running statistics than with the batches' own."""
    train, ev = (recording.of(f"loss_{mode}_mode").get("") for mode in ("train", "eval"))
    if train is None or ev is None or ev.values[-1] <= (1 + THRESHOLDS["lose"].value) * train.values[-1]:
        return []
    message = (
        f"the loss is {ev.values[-1]:.3g} at evaluation and {train.values[-1]:.3g} with the batches' own statistics:"
        " running statistics do not represent the batches"
    )
    evidence = {"train": train.values[-1], "eval": ev.values[-1]}
    return [Finding("train-to-eval gap", ("",), message, evidence, f"{CALIBRATE}{IF_NOT}")]


def nu(recording: Recording) -> list[Finding]:
    """Find PowerNorm's gradient statistic growing from step to step."""
    hit = {}
    for site, series in recording.of("Gamma").items():
        bound = recording.of("Gamma_bound").get(site)
        if bound is not None and series.middle() > THRESHOLDS["Gamma"].value * bound.values[-1]:
            hit[site] = series.middle() / bound.values[-1]
    for site, series in recording.of("nu").items():
        values = [value for _, value in series.points() if value > 0]
        if values and max(values) > THRESHOLDS["nu"].value * statistics.median(values):
            hit.setdefault(site, max(values) / statistics.median(values))
    if not hit:
        return []
    message = (
        f"{format_sites(hit)}: nu exceeds its bound ({max(hit.values()):.3g}x): PowerNorm's gradient statistic grows"
        " from step to step"
    )
    return [Finding("nu", tuple(hit), message, hit, "raise alpha_bkw, or set clamp=True")]


def exploding_depth(recording: Recording) -> list[Finding]:
    """Find inputs that grow over the layers."""
    levels = {site: series.middle() for site, series in recording.of("rms").items() if series.late()}
    if len(levels) < 2:
        return []
    first, (site, top) = next(iter(levels.values())), max(levels.items(), key=lambda pair: pair[1])
    if not top > THRESHOLDS["depth"].value * first > 0:
        return []
    message = f"{format_sites([site])}: its input is {top / first:.3g}x as large as at the first norm"
    advice = "normalize before each sublayer, or scale down the residual branches"
    return [Finding("exploding depth", (site,), message, {site: top / first}, advice)]


def gradient_spikes(recording: Recording) -> list[Finding]:
    """Find single gradients far above the median."""
    series = recording.of("gradient_norm").get("")
    late = series.late() if series else []
    if not late or not max(late) > THRESHOLDS["spike"].value * statistics.median(late):
        return []
    factor = max(late) / max(statistics.median(late), 1e-38)
    message, advice = f"the gradient spikes to {factor:.3g}x its median", "clip it, warm up longer, or use pre-norm"
    return [Finding("gradient spikes", ("",), message, {"": factor}, advice)]


def _first(series: Series, is_bad: Callable[[float], bool]) -> int:
    return next(step for step, value in zip(series.steps, series.values, strict=True) if is_bad(value))


def _worst(recording: Recording, quantity: str, sites: Iterable[str], unit: str = "") -> str:
    numbers = [value for site in sites if not math.isnan(value := recording.middle(quantity, site))]
    return f"{max(numbers):.3g}{unit}" if numbers else "(not recorded)"
