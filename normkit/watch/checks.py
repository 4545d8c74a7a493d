"""The table of all checks, and the rules about statistics of batches."""

import math
import statistics

from normkit.norms import PowerNorm
from normkit.watch.findings import LIMITS, LOSS, MASK, Check, Finding, above, by_site
from normkit.watch.learning import (
    bad_batches,
    collapse,
    dead_channels,
    large_values,
    loss,
    outlier_tokens,
    spike,
    young,
)
from normkit.watch.rows import Recording, Series
from normkit.watch.sites import Traits, traits

LEAST_BATCHES = 10  # sampled batches from which on lengths are compared


def unfit_mask(check: Check, recording: Recording) -> list[Finding]:
    """Find masks that do not fit the norm's input."""
    unfit = above(0, check.series(recording), Series.last)
    lengths = {recording.of("length")[site].last() for site in unfit if site in recording.of("length")}
    given = f"inputs of length {', '.join(f'{length:.0f}' for length in sorted(lengths))}" if lengths else "the input"
    message = f"the model's mask has length {{0:.0f}} and does not fit {given}: padding enters the statistics"
    advice = "pass a mask of the input's length, or use a per-token norm there"
    return check.findings(recording, unfit, message, advice)


def evaluation(check: Check, recording: Recording) -> list[Finding]:
    """Find running statistics that do not represent the batches."""
    hit = above(LIMITS["gap"], check.series(recording))
    holds = check.needs == "gap_batch" and all(
        recording.middle("gap_quadratic", site) <= LIMITS["gap_holds"] for site in hit
    )
    other = "pnv or un, whose statistics differ less here" if holds else "a per-token norm"
    advice = f"calibrate the model; if that does not help, the batches differ from each other: mix them, or try {other}"
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


def _any(norm: Traits) -> bool:
    return True


def _of_batches(norm: Traits) -> bool:
    return norm.batch


CHECKS = (
    Check("loss", loss, "loss", None, 4, 100, LOSS),
    Check("constant prediction", young, "constant_loss", None, how=LOSS),  # the faults are those of "loss"
    *(Check("nan", by_site(
        0, f"{{0:.0f}} {passes} were not finite or all padding and moved no statistics",
        "look for NaN or infinity in the data, and for a mask that is inverted; then lower the learning rate",
        number=Series.top),
        quantity, _of_batches, how="")
      for quantity, passes in (("skipped", "forwards"), ("skipped_grad", "backwards"))),
    Check("nan", bad_batches, "nonfinite", _any),
    Check("collapsed tokens", collapse, "similarity", _any, 2, LIMITS["steps"], how=""),
    Check("large values", large_values, "largest overflow", _any, how=""),
    Check("dead channels", dead_channels, "zero_channels dead", _any, 2),
    Check("dead channels", by_site(
        LIMITS["dead"], "no gradient has reached {percent:.0f} % of the output's channels",
        "look for something detached, activations that died behind the norm, weights of zero, an inverted mask, or"
        " float16 without a scaled loss",
        number=Series.last), "no_gradient", _any, 2, how=""),
    Check("zero gain", by_site(
        LIMITS["dead"], "the gain is zero in {percent:.0f} % of the channels, of which the norm passes nothing on",
        "train it, start it at 1, or take it out of weight decay", number=Series.last), "zero_gain", _any, 2, how=""),
    Check("gradient spikes", by_site(
        LIMITS["spike"], "the gradient spikes to {0:.3g}x its median", "clip it, warm up longer, or use pre-norm",
        number=spike), "gradient_norm", None, 4),
    Check("warm-up", by_site(
        0, "the warm-up has not ended, and lasts at least {0:.0f} more steps: training used each batch's own"
        " statistics, evaluation uses the running ones", "train longer, or give warmup=, such as a tenth of the steps",
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
