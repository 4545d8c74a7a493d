"""Every check of a training run by its rows: what is wrong, and what the rows do not let anybody say."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import normkit.watch.faults as faults
from normkit.norms import NORMS, StatNorm, options, parse
from normkit.watch.faults import THRESHOLDS, Finding
from normkit.watch.rows import Row
from normkit.watch.series import Table, freezes_quadratic_means, keeps_batch_statistics, norms, places, tabulate

NOT_CHECKED = "not checked"
"""The kind of a finding that says what could not be looked at."""

RECORD = 'record them: nk.record(model, quantities="default"), or normkit train --quantities default'
OFTEN = "record more often (every=, --record-every), or train longer"
TELL = (
    "record padding, and let a norm's mask, an embedding's padding_idx or an argument called attention_mask or"
    " ..._padding_mask tell which tokens are padding; where there is none nothing can be wrong"
)
TWO_LOSSES = (
    "normkit train measures it where its task scores both ways; after a loop of your own add rows of"
    " normkit.watch.train_eval_gap(model, loss), quantities loss_train_mode and loss_eval_mode"
)


class Check(NamedTuple):
    """A rule, the kind of fault that it finds, and what it has to be given: by each norm it judges, or by the model."""

    kind: str
    rule: Callable[[Table], list[Finding]]
    needs: str
    judges: Callable[[str], bool] | None
    """Which norms, by their names in rows; None where it is the whole model."""
    looks: int = 1
    """So many values, at least."""
    steps: float = 0
    """Nothing is judged of a shorter run."""
    how: str = RECORD


def _any(norm: str) -> bool:
    return True


def _centred(norm: str) -> bool:
    return keeps_batch_statistics(norm) and not freezes_quadratic_means(norm)


def _warms_up(norm: str) -> bool:
    try:
        name, _ = parse(norm)
    except ValueError:
        return False
    return issubclass(NORMS[name], StatNorm) and "warmup" in options(name)


def _is(name: str, **options: object) -> Callable[[str], bool]:
    """Whether a norm is of this name and has these options."""

    def judges(norm: str) -> bool:
        try:
            found, given = parse(norm)
        except ValueError:
            return False
        return found == name and options.items() <= given.items()

    return judges


AGE = THRESHOLDS["steps"].value
CHECKS = (
    Check("nan", faults.bad_batches, "nonfinite", _any),
    Check("warm-up", faults.warming, "warmup_left", _warms_up),
    Check("padding", faults.padding, "padding", keeps_batch_statistics, how=TELL),
    Check("tiny batches", faults.tiny_batches, "tokens", keeps_batch_statistics),
    Check("evaluation", faults.evaluation, "gap_batch", _centred, steps=AGE),
    Check("evaluation", faults.evaluation_quadratic, "gap_quadratic", freezes_quadratic_means, steps=AGE),
    Check("train-to-eval gap", faults.train_eval, "loss_train_mode loss_eval_mode", None, how=TWO_LOSSES),
    Check("nu", faults.nu, "nu Gamma Gamma_bound", _is("power"), 2),
    Check("filtered", faults.filtered, "filtered_rate", _is("un", outlier_filtration=True)),
    Check("exploding depth", faults.exploding_depth, "rms", _any),
    Check("exploding", faults.exploding, "rms", _any, 2),
    Check("large values", faults.large_values, "largest", _any),
    Check("dead channels", faults.dead_channels, "dead", _any),
    Check("gradient spikes", faults.gradient_spikes, "gradient_norm", None, 5),
)


def diagnose(rows: Iterable[Row] | Table) -> list[Finding]:
    """What is wrong with a training run, by its rows; what they do not let anybody say; an empty list for neither.

    Each finding names its places, says in words what is seen and what helps, and keeps the numbers. Those of kind
    "not checked" come last: they name the checks that could not be made, and how to record what these need. Where a
    norm keeps no batch statistics, what they would do there is no fault and is left to `advise`. The thresholds are a
    table, `normkit.watch.THRESHOLDS`. ValueError where there are no rows.

    >>> found = diagnose([Row(1, "norm", "batch", "padding", 0.3)])
    >>> [finding.kind for finding in found]
    ['padding', 'not checked', 'not checked']
    """
    table = tabulate(rows)
    found: list[Finding] = []
    lacking: dict[str, list[tuple[Check, str, tuple[str, ...]]]] = {}  # how to have it -> for what, where, names
    for check in CHECKS:
        found += check.rule(table) if _last(table) >= check.steps else []
        for site, names in _missing(check, table).items():
            lacking.setdefault(check.how if names else OFTEN, []).append((check, site, names))
    return found + [_not_checked(how, entries) for how, entries in lacking.items()]


def checked(rows: Iterable[Row] | Table) -> list[str]:
    """The kinds of faults that these rows let a doctor look for, somewhere in the model.

    >>> checked([Row(1, "norm", "layer", "dead", 0.0)])
    ['dead channels']
    """
    table = tabulate(rows)
    return list(dict.fromkeys(c.kind for c in CHECKS if len(_missing(c, table)) < len(_judged(c, table))))


def _judged(check: Check, table: Table) -> list[str]:
    """The places that a check is about; where no norm is known it might be about any: "" stands for that."""
    known = norms(table)
    if check.judges is None:
        batches = check.rule is not faults.train_eval or any(map(keeps_batch_statistics, known.values())) or not known
        return [""] if batches else []
    return [site for site, norm in known.items() if check.judges(norm)] if known else [""]


def _last(table: Table) -> int:
    return max(series.steps[-1] for sites in table.values() for series in sites.values())


def _missing(check: Check, table: Table) -> dict[str, tuple[str, ...]]:
    """The places where a check cannot be made: what is not there, or nothing where there is too little of it."""
    found = {}
    for site in _judged(check, table):
        needs = check.needs.split()
        lacks = tuple(name for name in needs if site not in table.get(name, {}))
        few = not lacks and any(len(table[name][site].values) < check.looks for name in needs)
        if lacks or few or _last(table) < check.steps:
            found[site] = lacks
    return found


def _not_checked(how: str, entries: Sequence[tuple[Check, str, tuple[str, ...]]]) -> Finding:
    kinds = dict.fromkeys(check.kind for check, *_ in entries)
    sites = dict.fromkeys(site for _, site, _ in entries)
    names = dict.fromkeys(name for *_, names in entries for name in names)
    why = f"no {', '.join(names)}" if names else "too few steps or looks"
    where = f" at {places(sites)}" if any(sites) else ""
    return Finding(NOT_CHECKED, tuple(sites), f"{', '.join(kinds)}: {why}{where}; {how}", {})
