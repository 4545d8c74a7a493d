"""Diagnosis of a training run: the table of checks, and the findings of a recording."""

from collections.abc import Iterable, Sequence

import normkit.watch.faults as faults
from normkit.norms import PowerNorm
from normkit.watch.faults import LIMITS, NOT_CHECKED, Check, Finding, by_site
from normkit.watch.recording import Recording, Row, Series, as_recording
from normkit.watch.row_names import (
    UNTRACKED,
    format_sites,
    freezes_quadratic_means,
    keeps_batch_statistics,
    norm_class,
    relies_on_batch,
    warms_up,
)

OFTEN = "record more often (every=, --record-every), or train longer"
MASK = (
    "record padding: give the model a norm with a mask, an embedding with padding_idx, or an argument named"
    " attention_mask or ..._padding_mask; a model without padding does not need this check"
)
TWO_LOSSES = (
    "papers train measures it where its task scores both ways; after a loop of your own add rows of"
    " normkit.watch.train_eval_gap(model, loss), quantities loss_train_mode and loss_eval_mode"
)


def _any(norm: str) -> bool:
    return True


CHECKS = (
    Check("nan", faults.bad_batches, "nonfinite", _any),
    Check("warm-up", by_site(
        0, "so far trained with each batch's own statistics, and for at least {0:.0f} more steps; evaluation uses the"
        " running ones", "train longer than that, or give a shorter warmup=", number=faults.last),
        "warmup_left", warms_up),
    Check("padding", faults.padding, "padding", keeps_batch_statistics, how=MASK, instead="mask_length"),
    Check("tiny batches", by_site(
        LIMITS["tokens"], "batches of {0:.0f} rows, too few for statistics",
        "larger batches, follow_optimizer, sync=True over processes, or a per-token norm", below=True),
        "tokens", keeps_batch_statistics),
    Check("large tokens", by_site(
        LIMITS["token_share"], "a few tokens are far larger than the others: statistics are those of {percent:.0f} %"
        " of the tokens, and the norm makes the others small",
        "add nk.scale_loss to the loss (papers train --scale-loss 0.1), or use a per-token norm there", below=True),
        "token_share", keeps_batch_statistics),
    Check("outlier tokens", by_site(
        LIMITS["outlier_share"], "a few tokens are far larger than the others, often the first of each sequence:"
        " a norm with running statistics in this place would divide by those of {percent:.2g} % of the tokens",
        "leave these norms as they are: convert(..., where=)",
        below=True), "token_share", lambda norm: not keeps_batch_statistics(norm)),
    Check("evaluation", faults.evaluation, "gap_batch",
          lambda norm: keeps_batch_statistics(norm) and not (freezes_quadratic_means(norm) or UNTRACKED in norm),
          steps=LIMITS["steps"]),
    Check("evaluation", faults.evaluation_quadratic, "gap_quadratic", freezes_quadratic_means, steps=LIMITS["steps"]),
    Check("batch length", faults.batch_length, "length_share length_share_quadratic", relies_on_batch, 6,
          LIMITS["steps"]),
    Check("train-to-eval gap", faults.train_eval, "loss_train_mode loss_eval_mode", None, how=TWO_LOSSES),
    Check("nu", faults.nu, "nu Gamma Gamma_bound", lambda norm: norm_class(norm)[0] is PowerNorm, 2),
    Check("filtered", by_site(
        LIMITS["filtered_rate"], "UN filters {percent:.0f} % of steps: it is PN-V now",
        'threshold="scalar", a longer window, or outlier_filtration=False', number=faults.last),
        "filtered_rate", lambda norm: norm_class(norm)[1].get("outlier_filtration") is True),
    Check("exploding depth", faults.exploding_depth, "rms", _any),
    Check("exploding", by_site(
        LIMITS["growth"], "the input grew {0:.3g}x during the run", "lower the learning rate", number=faults.growth),
        "rms", _any, samples=2),
    Check("large values", by_site(
        LIMITS["largest"], "values up to {0:.3g}", "float16 ends at 65504, use bfloat16 or float32",
        number=Series.top), "largest", _any),
    Check("dead channels", by_site(
        LIMITS["dead"], "{percent:.0f} % of the channels are dead: zero in every token of a batch"), "dead", _any),
    Check("gradient spikes", faults.gradient_spikes, "gradient_norm", None, 5),
)  # fmt: skip


def diagnose(rows: Iterable[Row] | Recording) -> list[Finding]:
    r"""Find faults of a training run in its recorded rows.

    A finding names its sites, states the observation and the remedy, and keeps the numbers. Checks for which the rows
    do not suffice are findings of kind "not checked", which come last and state how to record what is missing. The
    list is empty only if every check was made and found nothing. A norm without batch statistics has no fault of
    statistics; `normkit.watch.advise` compares it with norms that have them.

    Args:
        rows: Rows as `normkit.record` or `normkit.watch.read` gives them.

    Returns:
        The findings; `print(*findings, sep="\n")` shows them.

    Raises:
        TypeError: for anything but rows.
        ValueError: without any row.

    Examples:
        >>> found = diagnose([Row(1, "norm", "batch", "padding", 0.3)])
        >>> [finding.kind for finding in found]
        ['padding', 'not checked', 'not checked']
    """
    recording = as_recording(rows)
    found: list[Finding] = []
    lacking: dict[str, list[tuple[Check, str, tuple[str, ...]]]] = {}  # advice -> check, site, missing quantities
    for check in CHECKS:
        found += check.rule(check, recording) if recording.last_step() >= check.steps else []
        for site, names in _missing(check, recording).items():
            lacking.setdefault(check.how if names else OFTEN, []).append((check, site, names))
    return found + [_not_checked(how, entries) for how, entries in lacking.items()]


def checked(rows: Iterable[Row] | Recording) -> list[str]:
    """The kinds of faults for which the rows suffice, at one norm of the model at least.

    >>> checked([Row(1, "norm", "layer", "dead", 0.0)])
    ['dead channels']
    """
    recording = as_recording(rows)
    made = (check.kind for check in CHECKS if len(_missing(check, recording)) < len(_judged(check, recording)))
    return list(dict.fromkeys(made))


def _judged(check: Check, recording: Recording) -> list[str]:
    """The sites that a check concerns; [""] for the whole model, or if the rows name no norm."""
    norms = recording.norms()
    if check.judges is None:
        concerned = check.rule is not faults.train_eval or any(map(keeps_batch_statistics, norms.values())) or not norms
        return [""] if concerned else []
    return [site for site, norm in norms.items() if check.judges(norm)] if norms else [""]


def _missing(check: Check, recording: Recording) -> dict[str, tuple[str, ...]]:
    """Sites where a check cannot be made: missing quantities, or () for too few values."""
    found = {}
    for site in _judged(check, recording):
        needs = check.needs.split()
        if site in recording.quantities.get(check.instead, {}):
            continue
        lacks = tuple(name for name in needs if site not in recording.quantities.get(name, {}))
        few = not lacks and any(len(recording.quantities[name][site].values) < check.samples for name in needs)
        if lacks or few or recording.last_step() < check.steps:
            found[site] = lacks
    return found


def _not_checked(how: str, entries: Sequence[tuple[Check, str, tuple[str, ...]]]) -> Finding:
    kinds = dict.fromkeys(check.kind for check, *_ in entries)
    sites = dict.fromkeys(site for _, site, _ in entries)
    names = dict.fromkeys(name for *_, names in entries for name in names)
    why = f"no {', '.join(names)}" if names else "too few steps or samples"
    where = f" at {format_sites(sites)}" if any(sites) else ""
    return Finding(NOT_CHECKED, tuple(sites), f"{', '.join(kinds)}: {why}{where}; {how}", {})
