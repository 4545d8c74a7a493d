"""Rules that find out whether a model learns, and what stops it."""

import itertools
import math
import statistics

from normkit.watch.findings import LIMITS, NOT_CHECKED, Check, Finding, above, first_where, format_sites
from normkit.watch.rows import Recording, Series

FAST = 0.8  # loss over that before it, below which it falls fast


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
    far = end > max(LIMITS["rise"] * constant, FAST * before) or end > (1 + LIMITS["fall"]) * least
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
        "see that inputs and targets belong together, that gradients are set to zero each step and the loss is divided"
        " where they are accumulated, that the optimizer has the parameters of this model, and that nothing is"
        " detached; then try a tenth and ten times the learning rate, and more steps"
    )
    if "constant" in numbers:
        advice += ". A discriminator in balance, or targets that are mostly noise, look like this, too"
    found = [Finding(check.kind, ("",), message.format(**numbers), numbers, advice)]
    levels = {site: each.middle() for site, each in recording.of("rms").items() if each.late()}
    first = next(iter(levels.values()), 0.0)
    starts = {site: start for site in levels if (start := recording.of("rms")[site].values[0]) > 0}
    growth = {site: levels[site] / max(1, min(first, start)) for site, start in starts.items()}
    hit = {site: factor for site, factor in growth.items() if factor > LIMITS["growth"]}
    message = "the input is {0:.3g}x as large as at the first norm or at the start, and the loss does not fall"
    return found + check.findings(
        recording,
        hit,
        message,
        "set gradients to zero each step, lower the learning rate, or normalize before each sublayer",
        kind="exploding",
    )


def young(check: Check, recording: Recording) -> list[Finding]:
    """Name a loss that is above a constant prediction's and falls: it is too early to judge."""
    end, constant = recording.of("loss").get(""), recording.middle("constant_loss", "")
    if end is None or stalled(recording) or not (late := end.late()) or not late[-1] > constant:
        return []
    message = (
        f"{check.kind}: the loss is above it, {late[-1]:.4g} against {constant:.4g}, and still falls; train longer"
    )
    return [Finding(NOT_CHECKED, ("",), message, {"loss": late[-1], "constant": constant})]


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
    if bad := above(0, series, Series.top):
        step, _, first = min(
            (first_where(series[site], lambda value: value > 0), i, site) for i, site in enumerate(bad)
        )
        finite = dict(next(iter(series.values())).points()).get(step) == 0  # before the first norm
        overflow = half and (finite or dict(half.get(first, Series("", [], [])).points()).get(step, 0) > 0)
        what = "values exceed float16" if overflow else "values that are not finite"
        before = max((each for each in series[first].steps if each < step), default=step - 1)
        several = f"the batches of steps {before + 1} to {step} (record them with every=1)"
        this = "this batch" if step - before == 1 else several
        message = f"{format_sites(bad, recording)}: {what}, first seen at step {step}, from {first} on"
        losses = recording.of("loss").get("", Series("", [], []))
        peak = max((value for at, value in losses.points() if at < step), default=0.0)
        if overflow:
            advice = "use bfloat16 or float32"
        elif peak and peak > LIMITS["rise"] * abs(losses.points()[0][1]):
            advice = f"lower the learning rate, as the loss had risen to {peak:.3g}; else look at {this}"
        else:
            advice = f"look at {this}, else lower the learning rate"
        advice += ", or keep weights in float32 (autocast)" if half and not overflow else ""
        found.append(Finding("overflow" if overflow else "nan", tuple(bad), message, {**bad, "step": step}, advice))
    gaps = {site: each.last() for name in ("gap_quadratic", "gap_batch") for site, each in recording.of(name).items()}
    recovered = {site for site, each in series.items() if each.last() == 0}
    rows = recording.of("tokens")
    recovered -= {site for site, each in rows.items() if each.last() == 0}  # all padding, of which there is no gap
    corrupted = {site: gap for site, gap in gaps.items() if not math.isfinite(gap) and site in recovered}
    message = "running statistics are not finite though the last batch is: a NaN batch entered them; evaluation is NaN"
    found += check.findings(recording, corrupted, message, "load an earlier checkpoint, or calibrate")
    for quantity, name in (("loss", "loss"), ("gradient_norm", "gradient")):
        each = recording.of(quantity).get("")
        if each and not found and not math.isfinite(each.last()):  # a GradScaler skips such steps, and goes on
            step = first_where(each, lambda value: not math.isfinite(value))
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
    zero, advice = above(0, check.series(recording), Series.last), "look for masks, or activations that died"
    found = check.findings(recording, zero, "channels that were zero in every step: {0:.0f}", advice)
    dead = {site: share for site, share in above(LIMITS["dead"], recording.of("dead")).items() if site not in zero}
    message = "{percent:.0f} % of the channels are zero in every token of a batch"
    return found + check.findings(recording, dead, message, advice)


def spike(series: Series) -> float:
    """The largest late value over their median."""
    late = series.late()
    return max(late) / max(statistics.median(late), 1e-38) if late else 0.0
