"""The checks of a diagnosis: what each takes, its threshold, and the rule that finds the fault."""

import itertools
import math
import statistics
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from normkit._util import listed
from normkit.norms import PowerNorm
from normkit.watch.rows import Recording, Series
from normkit.watch.sites import Traits, traits

NOT_CHECKED = "not checked"  # kind of a finding that names checks for which the rows do not suffice
LEAST_BATCHES = 10  # sampled batches from which on lengths are compared


class Threshold(NamedTuple):
    """A number that a rule compares with, and its meaning."""

    value: float
    meaning: str


THRESHOLDS: dict[str, Threshold] = {
    "fall": Threshold(0.02, "share of the loss by which it has to fall: from the first steps, or while it is high"),
    "rise": Threshold(1.5, "largest loss over the first, or last over a constant prediction's, that is a divergence"),
    "constant": Threshold(0.95, "loss over that of the best constant prediction, above which nothing was learned"),
    "trained": Threshold(0.8, "the same ratio, below which a loss that does not fall is that of a trained model"),
    "similarity": Threshold(0.985, "mean cosine between tokens of a sequence, above which they have collapsed"),
    "growth": Threshold(30.0, "rms of a norm's input over the first norm's or over its start, both at least 1"),
    "largest": Threshold(6e4, "largest magnitude, near where float16 ends (65504)"),
    "spike": Threshold(20.0, "gradient norm over its median"),
    "dead": Threshold(0.05, "share of dead channels"),
    "typical_token": Threshold(0.1, "median over mean of the tokens' mean squares, below which a few tokens decide"),
    "token_share": Threshold(0.2, "share of tokens that the mean square averages over, below which a few decide it"),
    "padding": Threshold(0.01, "share of padding among the rows of a norm with batch statistics"),
    "tokens": Threshold(32, "rows of a batch below which its statistics are mostly chance"),
    "steps": Threshold(20, "steps before which running statistics still show their initial values: no gap is judged"),
    "gap": Threshold(0.25, "gap at evaluation, of the output's own size, above which frozen batch statistics fail"),
    "gap_holds": Threshold(0.15, "gap up to which a norm by quadratic means holds"),
    "length_share": Threshold(0.2, "share of the variance between batches that batch length explains"),
    "target_share": Threshold(0.05, "share of target lengths, given source lengths, that differs between batches"),
    "filtered_rate": Threshold(0.5, "share of steps that outlier filtration drops, above which UN is PN-V"),
    "Gamma": Threshold(1.0, "Gamma over its bound, above which nu grows"),
    "nu": Threshold(1e3, "growth of ||nu|| over its median, which is divergence"),
}

LIMITS = {name: threshold.value for name, threshold in THRESHOLDS.items()}
RECORD = 'record them: nk.record(model, quantities="default"), or papers train --quantities default'
OFTEN = "record more often (every=, --record-every), or train longer"
LOSS = (
    "record it: nk.record(model, loss=criterion), the module that the loop calls once a step; known for the mean of"
    " CrossEntropyLoss, NLLLoss, MSELoss, BCELoss and BCEWithLogitsLoss without weights; loss=lambda: loss records the"
    " loss alone; in Lightning Watch(loss='criterion')"
)
MASK = "a model without padding needs no more; else pass a mask, or give the embedding its padding_idx"


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
    judges: Callable[[Traits], bool] | None  # true for norms that it judges; None: the whole model
    samples: int = 1  # values of each quantity that it takes at least
    steps: float = 0  # length of the run from which on it judges
    how: str = RECORD  # advice on how to record the quantities; "": where they are missing, the check has no meaning
    instead: str = ""  # a quantity that answers the question in their place

    def series(self, recording: Recording) -> dict[str, Series]:
        """The series of the first quantity needed, at the norms that are judged."""
        found = recording.of(self.needs.split()[0])
        return {site: each for site, each in found.items() if self.judges is None or self.judges(traits(each.norm))}

    def findings(
        self, recording: Recording, hit: Mapping[str, float], message: str, advice: str = "", least: bool = False,
        kind: str = "",
    ) -> list[Finding]:  # fmt: skip
        """The finding about the sites in `hit`; none if there are none.

        The message is formatted with the largest number (or the `least`), `{0}`, and the same in percent, `{percent}`.
        """
        if not hit:
            return []
        worst = min(hit.values()) if least else max(hit.values())
        where = f"{format_sites(hit, recording)}: " if any(hit) else ""
        text = where + message.format(worst, percent=100 * worst)
        return [Finding(kind or self.kind, tuple(hit), text, hit, advice)]


Rule = Callable[[Check, Recording], list[Finding]]
Number = Callable[[Series], float]  # one number of a series


def by_site(
    limit: float, message: str, advice: str = "", *, number: Number = Series.middle, below: bool = False
) -> Rule:
    """Make a rule: a number of each norm's series must not be above (or `below`) a limit."""

    def rule(check: Check, recording: Recording) -> list[Finding]:
        numbers = {site: number(each) for site, each in check.series(recording).items()}
        hit = {site: value for site, value in numbers.items() if (value < limit if below else value > limit)}
        return check.findings(recording, hit, message, advice, least=below)

    return rule


# -- does the model learn? ----------------------------------------------------------------------------------------


def _level(losses: list[float]) -> float:
    """Median of the means of five stretches.

    A rare spike does not count, a few high losses among many low ones do.
    """
    cuts = [i * len(losses) // 5 for i in range(6)]
    return statistics.median(statistics.fmean(losses[a:b]) for a, b in itertools.pairwise(cuts) if a < b)


def stalled(recording: Recording) -> dict[str, float]:
    """The losses that show that nothing was learned; empty if the loss falls.

    Four things show it: the loss is that of the first step, and not that of a model which was trained before; it no
    longer falls where a constant prediction is; it rose far above its start, and has only come back to a constant
    prediction; or it is worse than that, by far or after it was lower.
    """
    series = recording.of("loss").get("")
    losses = [loss for _, loss in series.points()] if series else []
    if series is None or len(losses) < 2 or not math.isfinite(series.last()):
        return {}
    quarter = max(1, len(losses) // 4)
    first, end = losses[0], _level(losses[-quarter:])
    before = _level(losses[-2 * quarter : -quarter])
    constant = recording.middle("constant_loss", "")
    was_trained = max(first, end) < LIMITS["trained"] * constant
    if end > first - LIMITS["fall"] * abs(first) and not was_trained:
        return {"loss": end, "first": first}
    if end > LIMITS["constant"] * constant and end > before - LIMITS["fall"] * abs(before):
        return {"loss": end, "constant": constant}
    if end > LIMITS["constant"] * constant and max(losses) > LIMITS["rise"] * abs(first):
        return {"loss": end, "constant": constant, "peak": max(losses)}
    least = min(_level(losses[i * quarter : (i + 1) * quarter]) for i in range(len(losses) // quarter))
    far = end > LIMITS["rise"] * constant or end > (1 + LIMITS["fall"]) * least
    return {"loss": end, "constant": constant} if far and end > constant else {}


def loss(check: Check, recording: Recording) -> list[Finding]:
    """Find a loss that does not fall, and inputs that grow over the layers or the steps meanwhile."""
    constant = recording.of("constant_loss").get("")
    if constant and constant.top() == 0:
        message = "all targets are alike, or ignored: nothing can be learned"
        return [Finding(check.kind, ("",), message, {"constant": 0.0}, "look at the data")]
    numbers = stalled(recording)
    if not numbers:
        return []
    message = "the loss does not fall: {loss:.4g} at the end, it began at {first:.4g}"
    if "constant" in numbers:
        better = "hardly better" if numbers["loss"] <= numbers["constant"] else "worse"
        message = f"the loss is {better} than a constant prediction's: "
        message += "{loss:.4g} at the end, {constant:.4g} for a constant"
    message += ", and it rose to {peak:.4g}" if "peak" in numbers else ""
    advice = (
        "try a tenth and ten times the learning rate; see that inputs and targets belong together, that the optimizer"
        " has the parameters of the converted model, and that the loss is divided where gradients are accumulated"
    )
    found = [Finding(check.kind, ("",), message.format(**numbers), numbers, advice)]
    levels = {site: each.middle() for site, each in recording.of("rms").items() if each.late()}
    first = next(iter(levels.values()), 0.0)
    starts = {site: start for site in levels if (start := recording.of("rms")[site].values[0]) > 0}
    growth = {site: levels[site] / max(1, min(first, start)) for site, start in starts.items()}
    hit = {site: factor for site, factor in growth.items() if factor > LIMITS["growth"]}
    message = "the input is {0:.3g}x as large as at the first norm or at the start, and the loss does not fall"
    return found + check.findings(
        recording, hit, message, "lower the learning rate, or normalize before each sublayer", kind="exploding"
    )


def collapse(check: Check, recording: Recording) -> list[Finding]:
    """Find tokens that are alike from some norm to the last one; a loss that falls clears them."""
    if recording.of("loss") and not stalled(recording):
        return []
    numbers = [(site, each.middle()) for site, each in check.series(recording).items()]
    hit: dict[str, float] = {}
    for site, value in reversed(numbers):
        if not value > LIMITS["similarity"]:
            break
        hit = {site: value, **hit}
    message = "tokens have collapsed: the cosine between those of one sequence is {0:.3f}"
    return check.findings(
        recording, hit, message, "lower the learning rate, warm it up longer, or normalize before each sublayer"
    )


def bad_batches(check: Check, recording: Recording) -> list[Finding]:
    """Find batches that were not finite, and statistics that such a batch has corrupted."""
    found = []
    series, half = recording.of("nonfinite"), recording.of("overflow")
    if bad := _above(0, series, Series.top):
        step, _, first = min((_first(series[site], lambda value: value > 0), i, site) for i, site in enumerate(bad))
        finite = dict(next(iter(series.values())).points()).get(step) == 0  # before the first norm
        overflow = half and (finite or dict(half.get(first, Series("", [], [])).points()).get(step, 0) > 0)
        what = "values exceed float16" if overflow else "values that are not finite"
        before = max((each for each in series[first].steps if each < step), default=step - 1)
        several = f"the batches of steps {before + 1} to {step} (record them with every=1)"
        this = "this batch" if step - before == 1 else several
        message = f"{format_sites(bad, recording)}: {what}, first seen at step {step}, from {first} on"
        advice = "use bfloat16 or float32" if overflow else f"look at {this}, else lower the learning rate"
        found.append(Finding("overflow" if overflow else "nan", tuple(bad), message, {**bad, "step": step}, advice))
    gaps = {site: each.last() for name in ("gap_quadratic", "gap_batch") for site, each in recording.of(name).items()}
    recovered = {site for site, each in series.items() if each.last() == 0}
    corrupted = {site: gap for site, gap in gaps.items() if not math.isfinite(gap) and site in recovered}
    message = "running statistics are not finite though the last batch is: a NaN batch entered them; evaluation is NaN"
    found += check.findings(recording, corrupted, message, "load an earlier checkpoint, or calibrate")
    for quantity, name in (("loss", "loss"), ("gradient_norm", "gradient")):
        each = recording.of(quantity).get("")
        if each and not found and not math.isfinite(each.last()):  # a GradScaler skips such steps, and goes on
            step = _first(each, lambda value: not math.isfinite(value))
            advice = "scale the loss with torch.amp.GradScaler, or use bfloat16" if half else ""
            message = f"the {name} is not finite, first seen at step {step}"
            found.append(Finding("overflow" if half else "nan", ("",), message, {"step": step}, advice))
    return found


def outlier_tokens(check: Check, recording: Recording) -> list[Finding]:
    """Find norms in which few tokens decide the mean square, and name the largest one."""
    hit = {site: each.middle() for site, each in check.series(recording).items()}
    hit = {site: value for site, value in hit.items() if value < LIMITS["typical_token"]}
    if not hit:
        return []
    worst = min(hit, key=hit.__getitem__)
    factor, place = (recording.middle(name, worst) for name in ("largest_token", "largest_token_place"))
    named = f"the token at position {place:.0f} of a sequence has {factor:.3g} times the root mean square of the median"
    message = (
        "few tokens are far larger than the others"
        + (f": at {worst} {named} token" if math.isfinite(place) else "")
        + "; a norm with running statistics would make the others {0:.3g} times too small"
    )
    hit = {site: 1 / math.sqrt(max(value, 1e-38)) for site, value in hit.items()}
    return check.findings(recording, hit, message, "leave these norms as they are: convert(..., where=)")


def large_values(check: Check, recording: Recording) -> list[Finding]:
    """Find values near the end of float16, where the model computes in it."""
    half = recording.of("overflow")
    hit = {site: top for site, each in check.series(recording).items() if site in half and (top := each.top())}
    hit = {site: top for site, top in hit.items() if top > LIMITS["largest"]}
    return check.findings(recording, hit, "values up to {0:.3g}", "float16 ends at 65504, use bfloat16 or float32")


def dead_channels(check: Check, recording: Recording) -> list[Finding]:
    """Find channels that are zero in every step, and norms in which many are zero in each batch."""
    zero, advice = _above(0, check.series(recording), Series.last), "look for masks, or activations that died"
    found = check.findings(recording, zero, "channels that were zero in every step: {0:.0f}", advice)
    dead = {site: share for site, share in _above(LIMITS["dead"], recording.of("dead")).items() if site not in zero}
    message = "{percent:.0f} % of the channels are zero in every token of a batch"
    return found + check.findings(recording, dead, message, advice)


def spike(series: Series) -> float:
    """The largest late value over their median."""
    late = series.late()
    return max(late) / max(statistics.median(late), 1e-38) if late else 0.0


# -- do statistics of batches hold? -----------------------------------------------------------------------------------


def unfit_mask(check: Check, recording: Recording) -> list[Finding]:
    """Find masks that do not fit the norm's input."""
    unfit = _above(0, check.series(recording), Series.last)
    lengths = {recording.of("length")[site].last() for site in unfit if site in recording.of("length")}
    given = f"inputs of length {', '.join(f'{length:.0f}' for length in sorted(lengths))}" if lengths else "the input"
    message = f"the model's mask has length {{0:.0f}} and does not fit {given}: padding enters the statistics"
    advice = "pass a mask of the input's length, or use a per-token norm there"
    return check.findings(recording, unfit, message, advice)


def evaluation(check: Check, recording: Recording) -> list[Finding]:
    """Find running statistics that do not represent the batches."""
    hit = _above(LIMITS["gap"], check.series(recording))
    holds = check.needs == "gap_batch" and all(
        recording.middle("gap_quadratic", site) <= LIMITS["gap_holds"] for site in hit
    )
    other = "pnv or un, which will hold" if holds else "a per-token norm"
    advice = f"calibrate the model; if that does not help, the batches differ from each other: mix them, or use {other}"
    message = "running statistics do not represent the batches: at evaluation the output is off by {percent:.0f} %"
    return check.findings(recording, hit, message, advice)


def target_share(recording: Recording) -> float:
    """Return the share of target lengths, given source lengths, that is between batches.

    It is a share of variance. The first norm reads sources, the last one targets. What a line through the batches' mean
    lengths leaves of the targets' is compared with the spread in a batch. Shuffled batches have a share near 0.

    Returns:
        The share; 0 if all sequences have one length; nan if lengths were not recorded in ten batches, or the first and
        last norm read the same sequences.
    """
    lengths, spreads = recording.of("length"), recording.of("length_spread")
    if not lengths or list(lengths)[-1] not in spreads:
        return math.nan
    first, *_, last = (*lengths, *lengths)
    points = [dict(series.points()) for series in (lengths[first], lengths[last], spreads[last])]
    steps = [step for step in points[0] if all(step in each for each in points)]
    if len(steps) < LEAST_BATCHES:
        return math.nan
    x, y, spread = ([each[step] for step in steps] for each in points)
    if min(x) == max(x) and min(y) == max(y) and not any(spread):
        return 0.0
    if x == y or min(x) == max(x) or min(y) == max(y):
        return math.nan
    between = statistics.pvariance(y) * (1 - statistics.correlation(x, y) ** 2)
    total = between + statistics.fmean(each * each for each in spread)
    return between / total if total else 0.0


def batch_length(check: Check, recording: Recording) -> list[Finding]:
    """Find statistics of each batch that tell the model how long its target is."""
    if target_share(recording) <= LIMITS["target_share"]:
        return []  # the source's length gives the target's away already, or all lengths are alike
    hit = {}
    for site, norm in recording.norms().items():
        quantity = "length_share_quadratic" if traits(norm).quadratic else "length_share"
        if traits(norm).relies_on_batch and (share := recording.middle(quantity, site)) > LIMITS["length_share"]:
            hit[site] = share
    message = (
        "statistics carry the length of the batch, which explains up to {percent:.0f} % of their variance between"
        " batches; a model can learn to read it there, and running statistics do not have it"
    )
    advice = "shuffle the batches, or use a norm by past batches (un, power); calibration does not repair it"
    return check.findings(recording, hit, message, advice)


def nu(check: Check, recording: Recording) -> list[Finding]:
    """Find PowerNorm's gradient statistic growing from step to step."""
    hit = {}
    for site, series in recording.of("Gamma").items():
        bound = recording.of("Gamma_bound").get(site)
        if bound is not None and series.middle() > LIMITS["Gamma"] * (most := bound.last()) > 0:
            hit[site] = series.middle() / most
    for site, series in recording.of("nu").items():
        values = [value for _, value in series.points() if value > 0]
        if values and max(values) > LIMITS["nu"] * statistics.median(values):
            hit.setdefault(site, max(values) / statistics.median(values))
    message = "nu exceeds its bound ({0:.3g}x): PowerNorm's gradient statistic grows from step to step"
    return check.findings(recording, hit, message, "raise alpha_bkw, or set clamp=True")


def _above(limit: float, series: Mapping[str, Series], number: Number = Series.middle) -> dict[str, float]:
    return {site: value for site, each in series.items() if (value := number(each)) > limit}


def _first(series: Series, is_bad: Callable[[float], bool]) -> int:
    return next(step for step, value in zip(series.steps, series.values, strict=True) if is_bad(value))


def format_sites(sites: Collection[str], recording: Recording) -> str:
    """Name sites in few words: all norms, or a list."""
    norms = recording.norms()
    return f"all {len(norms)} norms" if len(norms) > 2 and set(norms) <= set(sites) else listed(sites)


def _any(norm: Traits) -> bool:
    return True


def _of_batches(norm: Traits) -> bool:
    return norm.batch


CHECKS = (
    Check("loss", loss, "loss", None, 4, 100, LOSS),
    Check("constant prediction", lambda check, recording: [], "constant_loss", None, how=LOSS),  # part of "loss"
    *(Check("nan", by_site(
        0, f"{{0:.0f}} {passes} were not finite or all padding and moved no statistics",
        "look for NaN or infinity in the data, then lower the learning rate", number=Series.top),
        quantity, _of_batches, how="")
      for quantity, passes in (("skipped", "forwards"), ("skipped_grad", "backwards"))),
    Check("nan", bad_batches, "nonfinite", _any),
    Check("collapsed tokens", collapse, "similarity", _any, 2, LIMITS["steps"], how=""),
    Check("large values", large_values, "largest overflow", _any, how=""),
    Check("dead channels", dead_channels, "zero_channels dead", _any, 2),
    Check("dead channels", by_site(
        LIMITS["dead"], "no gradient has reached {percent:.0f} % of the output's channels",
        "look for activations that died behind the norm, weights of zero, or float16 without a scaled loss",
        number=Series.last), "no_gradient", _any, 2, how=""),
    Check("zero gain", by_site(
        LIMITS["dead"], "the gain is zero in {percent:.0f} % of the channels, of which the norm passes nothing on",
        "train it, start it at 1, or take it out of weight decay", number=Series.last), "zero_gain", _any, 2, how=""),
    Check("gradient spikes", by_site(
        LIMITS["spike"], "the gradient spikes to {0:.3g}x its median", "clip it, warm up longer, or use pre-norm",
        number=spike), "gradient_norm", None, 4),
    Check("warm-up", by_site(
        0, "the warm-up has not ended, and lasts at least {0:.0f} more steps: training used each batch's own"
        " statistics, evaluation uses the running ones", "train longer than that, or give a shorter warmup=",
        number=Series.last),
        "warmup_left", lambda norm: norm.warms_up),
    Check("padding", by_site(
        LIMITS["padding"], "{percent:.0f} % of the rows that the statistics are taken over are padding",
        "pass the norm its mask (convert(..., mask_from=...)), or see whether that is inverted"),
        "padding", _of_batches, how=MASK, instead="mask_length"),
    Check("padding", unfit_mask, "mask_length", _of_batches, how=""),
    Check("tiny batches", by_site(
        LIMITS["tokens"], "batches of {0:.0f} rows, too few for statistics",
        "larger batches, follow_optimizer, sync=True over processes, or a per-token norm", below=True),
        "tokens", _of_batches),
    Check("large tokens", by_site(
        LIMITS["token_share"], "a few tokens are far larger than the others: statistics are those of {percent:.0f} %"
        " of the tokens, and the norm makes the others small",
        "start a tied embedding with std=0.02, add nk.scale_loss, or use a per-token norm there", below=True),
        "token_share", _of_batches),
    Check("outlier tokens", outlier_tokens, "typical_token", lambda norm: not norm.batch),
    Check("evaluation", evaluation, "gap_batch",
          lambda norm: norm.batch and norm.tracks and not norm.quadratic, steps=LIMITS["steps"]),
    Check("evaluation", evaluation, "gap_quadratic", lambda norm: norm.quadratic, steps=LIMITS["steps"]),
    Check("batch length", batch_length, "length_share length_share_quadratic",
          lambda norm: norm.relies_on_batch, 6, LIMITS["steps"]),
    Check("nu", nu, "nu Gamma Gamma_bound", lambda norm: norm.kind is PowerNorm, 2),
    Check("filtered", by_site(
        LIMITS["filtered_rate"], "UN filters {percent:.0f} % of steps: it is pnv now",
        'threshold="scalar", a longer window, or outlier_filtration=False', number=Series.last),
        "filtered_rate", lambda norm: norm.options.get("outlier_filtration") is True),
)  # fmt: skip
