"""Rules that find faults of a training run in its rows, and their thresholds."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from normkit.watch.length import target_share
from normkit.watch.recording import Recording, Series
from normkit.watch.row_names import format_sites, freezes_quadratic_means, relies_on_batch

NOT_CHECKED = "not checked"  # kind of a finding that names checks for which the rows do not suffice


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
    "token_share": Threshold(0.2, "share of tokens that the mean square averages over, below which a few decide it"),
    "outlier_share": Threshold(0.02, "the same at a per-token norm, below which no other norm can take its place"),
    "filtered_rate": Threshold(0.5, "share of steps that outlier filtration drops, above which UN is PN-V"),
    "Gamma": Threshold(1.0, "Gamma over its bound, above which nu grows"),
    "nu": Threshold(1e3, "growth of ||nu|| over its median, which is divergence"),
    "depth": Threshold(30.0, "rms of the last norm's input over the first one's, or over 1 if that is larger"),
    "growth": Threshold(30.0, "rms of a norm's input at the end over its start, or over 1 if that is larger"),
    "largest": Threshold(6e4, "largest magnitude, near where float16 ends (65504)"),
    "dead": Threshold(0.05, "share of dead channels"),
    "spike": Threshold(20.0, "gradient norm over its median"),
    "lose": Threshold(0.1, "evaluation loss over training-mode loss, less 1"),
}

LIMITS = {name: threshold.value for name, threshold in THRESHOLDS.items()}
RECORD = 'record them: nk.record(model, quantities="default"), or papers train --quantities default'
CALIBRATE = (
    "calibrate the model; if that does not help, the batches differ from each other: mix them, or use a per-token norm"
)


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


class Check(NamedTuple):
    """A check for one fault."""

    kind: str  # name of the fault
    rule: "Rule"  # finds it in a recording
    needs: str  # quantities that it takes, separated by blanks
    judges: Callable[[str], bool] | None  # true for norms that it judges, by their names in rows; None: the whole model
    samples: int = 1  # values of each quantity that it takes at least
    steps: float = 0  # length of the run from which on it judges
    how: str = RECORD  # advice on how to record the quantities
    instead: str = ""  # a quantity that answers the question in their place

    def series(self, recording: Recording) -> dict[str, Series]:
        """The series of the first quantity needed, at the norms that are judged."""
        found = recording.of(self.needs.split()[0])
        return {site: each for site, each in found.items() if self.judges is None or self.judges(each.norm)}

    def findings(self, hit: Mapping[str, float], message: str, advice: str = "", least: bool = False) -> list[Finding]:
        """The finding about the sites in `hit`; none if there are none.

        The message is formatted with the largest number (or the `least`), `{0}`, and the same in percent, `{percent}`.
        """
        if not hit:
            return []
        worst = min(hit.values()) if least else max(hit.values())
        text = f"{format_sites(hit)}: {message.format(worst, percent=100 * worst)}"
        return [Finding(self.kind, tuple(hit), text, hit, advice)]


Rule = Callable[[Check, Recording], list[Finding]]
Number = Callable[[Series], float]  # one number of a series


def by_site(
    limit: float, message: str, advice: str = "", *, number: Number = Series.middle, below: bool = False
) -> Rule:
    """Make a rule: a number of each norm's series must not be above (or `below`) a limit."""

    def rule(check: Check, recording: Recording) -> list[Finding]:
        numbers = {site: number(each) for site, each in check.series(recording).items()}
        hit = {site: value for site, value in numbers.items() if (value < limit if below else value > limit)}
        return check.findings(hit, message, advice, least=below)

    return rule


def last(series: Series) -> float:
    """The value of the last step."""
    return series.values[-1]


def padding(check: Check, recording: Recording) -> list[Finding]:
    """Find padding among the rows of statistics, and masks that do not fit the norm's input."""
    message = "{percent:.0f} % of the rows that the statistics are taken over are padding"
    advice = "pass the norm its mask (convert(..., mask_from=...))"
    found = check.findings(_above(LIMITS["padding"], check.series(recording)), message, advice)
    unfit = {site: last(each) for site, each in recording.of("mask_length").items()}
    lengths = [last(each) for site, each in recording.of("length").items() if site in unfit]
    given = f"inputs of length {lengths[0]:.0f}" if lengths else "inputs of another length"
    message = f"the model's mask has length {{0:.0f}} and does not fit {given}: padding enters the statistics"
    return found + check.findings(unfit, message, "pass a mask of the input's length, or use a per-token norm there")


def growth(series: Series) -> float:
    """The late median over the first value; nan where it is small: small weights grow."""
    small = not 0 < series.values[0] < math.inf or series.middle() <= LIMITS["growth"]
    return math.nan if small else series.middle() / series.values[0]


def bad_batches(check: Check, recording: Recording) -> list[Finding]:
    """Find batches that were not finite, and statistics that one of them has corrupted."""
    found = []
    for quantity, passes in (("skipped", "forwards"), ("skipped_grad", "backwards")):
        message = f"{{0:.0f}} {passes} were not finite or all padding and moved no statistics"
        advice = "look for NaN or infinity in the data, then lower the learning rate"
        found += check.findings(_above(0, recording.of(quantity), Series.top), message, advice)
    series = recording.of("nonfinite")
    if bad := _above(0, series, Series.top):
        step, _, first = min((_first(series[site], lambda value: value > 0), i, site) for i, site in enumerate(bad))
        message = f"{format_sites(bad)}: values that are not finite, first at step {step}, from {first} on"
        found.append(Finding("nan", tuple(bad), message, {**bad, "step": step}, "a NaN batch, or a diverged run"))
    gaps = {site: last(each) for name in ("gap_quadratic", "gap_batch") for site, each in recording.of(name).items()}
    finite = {site for site, each in series.items() if last(each) == 0}
    corrupted = {site: gap for site, gap in gaps.items() if not math.isfinite(gap) and site in finite}
    message = "running statistics are not finite though the last batch is: a NaN batch entered them; evaluation is NaN"
    found += check.findings(corrupted, message, "load an earlier checkpoint, or calibrate")
    gradients = recording.of("gradient_norm").get("")
    if gradients and not found and not math.isfinite(last(gradients)):  # a GradScaler skips such steps, and goes on
        step = _first(gradients, lambda value: not math.isfinite(value))
        found.append(Finding("nan", ("",), f"the gradient is not finite, first seen at step {step}", {"step": step}))
    return found


def evaluation(check: Check, recording: Recording) -> list[Finding]:
    """Find running means and variances that do not represent the batches."""
    unknown, other = "what a quadratic mean would do was not recorded (gap_quadratic)", "use a per-token norm"
    groups: dict[str, dict[str, float]] = {}  # advice -> gaps
    for site, gap in _above(LIMITS["gap"], check.series(recording)).items():
        quadratic = recording.middle("gap_quadratic", site)
        advice = "PN-V or UN will hold" if quadratic <= LIMITS["gap_holds"] else other
        groups.setdefault(unknown if math.isnan(quadratic) else advice, {})[site] = gap
    found = []
    for advice, hit in groups.items():
        message = (
            f"batch variance is {_worst(recording, 'drift_var', hit, 'x')} from its running value, the mean"
            f" {_worst(recording, 'drift_mean', hit)} standard deviations: BatchNorm will fail at evaluation here"
            " (off by {percent:.0f} %)"
        )
        if advice != unknown:
            message += f"; quadratic mean is {_worst(recording, 'drift_quadratic', hit, 'x')} from its own"
        found += check.findings(hit, message + (", too" if advice == other else ""), advice)
    return found


def evaluation_quadratic(check: Check, recording: Recording) -> list[Finding]:
    """Find running quadratic means that do not represent the batches."""
    hit = _above(LIMITS["gap"], check.series(recording))
    message = (
        f"quadratic mean is {_worst(recording, 'drift_quadratic', hit, 'x')} from its running value: the norm will fail"
        " at evaluation (off by {percent:.0f} %)"
    )
    return check.findings(hit, message, CALIBRATE)


def batch_length(check: Check, recording: Recording) -> list[Finding]:
    """Find statistics of each batch that tell the model how long its target is."""
    if target_share(recording) <= LIMITS["target_share"]:
        return []  # the source's length gives the target's away already, or all lengths are alike
    hit = {}
    for site, norm in recording.norms().items():
        quantity = "length_share_quadratic" if freezes_quadratic_means(norm) else "length_share"
        if relies_on_batch(norm) and (share := recording.middle(quantity, site)) > LIMITS["length_share"]:
            hit[site] = share
    message = (
        "statistics carry the length of the batch, which explains up to {percent:.0f} % of their variance between"
        " batches; a model can learn to read it there, and running statistics do not have it"
    )
    advice = "shuffle the batches, or use a norm by past batches (un, power); calibration does not repair it"
    return check.findings(hit, message, advice)


def train_eval(check: Check, recording: Recording) -> list[Finding]:
    """Find a loss that is larger with running statistics than with the batches' own."""
    numbers = {m: last(each) for m in ("train", "eval") if (each := recording.of(f"loss_{m}_mode").get(""))}
    train = numbers.get("train", math.nan)
    if len(numbers) < 2 or not math.isfinite(train) or numbers["eval"] - train <= LIMITS["lose"] * abs(train):
        return []  # where both are not finite, the statistics are not the reason
    message = (
        "the loss is {eval:.3g} at evaluation and {train:.3g} with the batches' own statistics: running statistics do"
        " not represent the batches"
    )
    return [Finding(check.kind, ("",), message.format(**numbers), numbers, CALIBRATE)]


def nu(check: Check, recording: Recording) -> list[Finding]:
    """Find PowerNorm's gradient statistic growing from step to step."""
    hit = {}
    for site, series in recording.of("Gamma").items():
        bound = recording.of("Gamma_bound").get(site)
        if bound is not None and series.middle() > LIMITS["Gamma"] * (most := last(bound)) > 0:
            hit[site] = series.middle() / most
    for site, series in recording.of("nu").items():
        values = [value for _, value in series.points() if value > 0]
        if values and max(values) > LIMITS["nu"] * statistics.median(values):
            hit.setdefault(site, max(values) / statistics.median(values))
    message = "nu exceeds its bound ({0:.3g}x): PowerNorm's gradient statistic grows from step to step"
    return check.findings(hit, message, "raise alpha_bkw, or set clamp=True")


def exploding_depth(check: Check, recording: Recording) -> list[Finding]:
    """Find inputs that grow over the layers."""
    levels = {site: series.middle() for site, series in recording.of("rms").items() if series.late()}
    first, site = next(iter(levels.values()), 0), max(levels, key=levels.__getitem__, default="")
    hit = {site: levels[site] / first} if first > 0 and levels[site] > LIMITS["depth"] * max(first, 1) else {}
    advice = "normalize before each sublayer, or scale down the residual branches"
    return check.findings(hit, "its input is {0:.3g}x as large as at the first norm", advice)


def gradient_spikes(check: Check, recording: Recording) -> list[Finding]:
    """Find single gradients far above the median."""
    series = recording.of("gradient_norm").get("")
    late = series.late() if series else []
    if not late or not max(late) > LIMITS["spike"] * statistics.median(late):
        return []
    factor = max(late) / max(statistics.median(late), 1e-38)
    message, advice = f"the gradient spikes to {factor:.3g}x its median", "clip it, warm up longer, or use pre-norm"
    return [Finding(check.kind, ("",), message, {"": factor}, advice)]


def _above(limit: float, series: Mapping[str, Series], number: Number = Series.middle) -> dict[str, float]:
    return {site: value for site, each in series.items() if (value := number(each)) > limit}


def _first(series: Series, is_bad: Callable[[float], bool]) -> int:
    return next(step for step, value in zip(series.steps, series.values, strict=True) if is_bad(value))


def _worst(recording: Recording, quantity: str, sites: Iterable[str], unit: str = "") -> str:
    numbers = [value for site in sites if not math.isnan(value := recording.middle(quantity, site))]
    return f"{max(numbers):.3g}{unit}" if numbers else "(not recorded)"
