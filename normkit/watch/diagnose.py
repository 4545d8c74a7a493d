"""Say in words what rows show: what will fail, where, by which evidence, and what to do about it."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from normkit.norms import NORMS, StatNorm, parse
from normkit.watch.rows import Row


class Threshold(NamedTuple):
    """A number that decides, and what it decides."""

    value: float
    meaning: str


THRESHOLDS: dict[str, Threshold] = {
    "gap": Threshold(0.25, "gap at evaluation, of the output's own size, above which frozen batch statistics fail"),
    "gap_holds": Threshold(0.15, "gap up to which a norm by quadratic means is said to hold"),
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


class Series(NamedTuple):
    """One quantity of one norm over the steps."""

    norm: str
    steps: list[int]
    values: list[float]

    def late(self) -> list[float]:
        """Finite values of the second half of the steps, when running statistics have forgotten their start."""
        middle = (self.steps[0] + self.steps[-1]) / 2
        return [v for s, v in zip(self.steps, self.values, strict=True) if s >= middle and math.isfinite(v)]

    def middle(self) -> float:
        """Their median; nan where there is none."""
        late = self.late()
        return statistics.median(late) if late else math.nan


Table = dict[str, dict[str, Series]]  # quantity -> site -> values


def diagnose(rows: Iterable[Row]) -> list[Finding]:
    """What is wrong with a training run, by its rows; an empty list where nothing is.

    Each finding names its places, says in words what is seen and what helps, and keeps the numbers. Where a norm keeps
    no batch statistics, what they would do there is no fault and is left to `advise`. The thresholds are a table,
    `normkit.watch.THRESHOLDS`. ValueError where there are no rows.

    >>> [finding.kind for finding in diagnose([Row(1, "norm", "batch", "padding", 0.3)])]
    ['padding']
    """
    table = tabulate(rows)
    return [finding for rule in RULES for finding in rule(table)]


def advise(rows: Iterable[Row]) -> list[str]:
    """What batch statistics would do at the norms that keep none: a line for those places that are alike.

    >>> rows = [Row(1, "norm", "LayerNorm", f"gap_{kind}", 0.9) for kind in ("batch", "quadratic")]
    >>> print(*advise(rows))
    norm: BatchNorm would fail at evaluation here (off by 90 %), and so would PN-V and UN (90 %): keep a norm of tokens
    """
    table = tabulate(rows)
    groups: dict[str, list[str]] = {}
    numbers: dict[str, list[tuple[float, float]]] = {}
    for site, series in table.get("gap_batch", {}).items():
        if not keeps_batch_statistics(series.norm):
            gap, quadratic = series.middle(), _middle(table, "gap_quadratic", site)
            verdict = _verdict(gap, quadratic)
            groups.setdefault(verdict, []).append(site)
            numbers.setdefault(verdict, []).append((gap, quadratic))
    return [
        f"{places(sites)}: " + verdict.format(*(f"{100 * max(column):.0f} %" for column in zip(*numbers[verdict])))  # noqa: B905
        for verdict, sites in groups.items()
    ]


def _verdict(gap: float, quadratic: float) -> str:
    fails, holds = THRESHOLDS["gap"].value, THRESHOLDS["gap_holds"].value
    if not gap > fails:
        return "BatchNorm would hold at evaluation here (off by {0}), PN-V and UN too ({1})"
    if quadratic <= holds:
        return "BatchNorm would fail at evaluation here (off by {0}); PN-V or UN would hold ({1})"
    if quadratic <= fails:
        return "BatchNorm would fail at evaluation here (off by {0}); PN-V and UN are in doubt ({1})"
    return "BatchNorm would fail at evaluation here (off by {0}), and so would PN-V and UN ({1}): keep a norm of tokens"


def tabulate(rows: Iterable[Row]) -> Table:
    """Rows by quantity and site, in the order of the steps; ValueError where there are none."""
    table: Table = {}
    for row in rows:
        new = Series(row.norm, [], [])
        series = table.setdefault(row.quantity, {}).setdefault(row.site, new)
        series.steps.append(row.step)
        series.values.append(row.value)
    if not table:
        raise ValueError("there are no rows to judge; record some with normkit.record")
    return table


def keeps_batch_statistics(norm: str) -> bool:
    """Whether a norm, as rows name it, freezes batch statistics for evaluation.

    >>> [keeps_batch_statistics(norm) for norm in ("un(window=2)", "layer", "BatchNorm2d", "LlamaRMSNorm")]
    [True, False, True, False]
    """
    try:
        return issubclass(NORMS[parse(norm)[0]], StatNorm)
    except (ValueError, TypeError):
        return "BatchNorm" in norm


def places(sites: Iterable[str]) -> str:
    """Sites in few words: numbered neighbours as a range.

    >>> places(["layers.4.norm1", "layers.5.norm1", "layers.6.norm1", "final_norm"])
    'layers.4-6.norm1, final_norm'
    """
    shown: list[tuple[str, int, int, str]] = []
    plain: list[str] = []
    for site in sites:
        head, number, tail = _numbered(site)
        runs = [i for i, run in enumerate(shown) if (run[0], run[3]) == (head, tail) and run[2] + 1 == number]
        if number is None:
            plain.append(site or "the model")
        elif runs:
            shown[runs[0]] = (*shown[runs[0]][:2], number, tail)
        else:
            shown.append((head, number, number, tail))
    ranges = [f"{head}{a}{tail}" if a == b else f"{head}{a}-{b}{tail}" for head, a, b, tail in shown]
    every = [*ranges, *plain]
    return ", ".join(every[:6]) + (f" and {len(every) - 6} more" if len(every) > 6 else "")


def _numbered(site: str) -> tuple[str, int | None, str]:
    parts = site.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            head, tail = ".".join(parts[:i]), ".".join(parts[i + 1 :])
            return head + "." if head else "", int(part), "." + tail if tail else ""
    return site, None, ""


def _middle(table: Table, quantity: str, site: str) -> float:
    series = table.get(quantity, {}).get(site)
    return math.nan if series is None else series.middle()


def _over(
    table: Table, quantity: str, limit: str, number: Callable[[Series], float] = Series.middle
) -> dict[str, float]:
    """The sites with batch statistics of their own where a quantity is above a threshold, and by how much it shows."""
    numbers = {
        s: number(series) for s, series in table.get(quantity, {}).items() if keeps_batch_statistics(series.norm)
    }
    return {site: value for site, value in numbers.items() if value > THRESHOLDS[limit].value}


def _top(series: Series) -> float:
    return max((value for value in series.values if math.isfinite(value)), default=math.nan)


# -- one rule a fault --------------------------------------------------------------------------------------------


def _bad_batches(table: Table) -> list[Finding]:
    found = []
    for quantity, what in (("skipped", "forwards"), ("skipped_grad", "backwards")):
        hit = {site: _top(series) for site, series in table.get(quantity, {}).items() if _top(series) > 0}
        if hit:
            says = (
                f"{places(hit)}: {max(hit.values()):.0f} {what} were not finite or all padding and moved no statistics:"
                " look for NaN or infinity in the data, then lower the learning rate"
            )
            found.append(Finding("nan", tuple(hit), says, hit))
    bad = {site: _top(series) for site, series in table.get("nonfinite", {}).items() if _top(series) > 0}
    if bad:
        when = min(s for site in bad for s, v in zip(*table["nonfinite"][site][1:], strict=True) if v > 0)
        says = f"{places(bad)}: values that are not finite, first seen at step {when}: a NaN batch, or a diverged run"
        found.append(Finding("nan", tuple(bad), says, {**bad, "step": when}))
    gradients = table.get("gradient_norm", {}).get("")
    if gradients and not bad and not found and any(not math.isfinite(value) for value in gradients.values):
        when = next(s for s, v in zip(gradients.steps, gradients.values, strict=True) if not math.isfinite(v))
        found.append(Finding("nan", ("",), f"the gradient is not finite, first seen at step {when}", {"step": when}))
    return found


def _padding(table: Table) -> list[Finding]:
    hit = _over(table, "padding", "padding")
    if not hit:
        return []
    says = (
        f"{places(hit)}: {100 * max(hit.values()):.0f} % of the rows that the statistics are taken over are padding:"
        " pass the norm its mask (convert(..., mask_from=...))"
    )
    return [Finding("padding", tuple(hit), says, hit)]


def _tiny(table: Table) -> list[Finding]:
    counts = {s: x.middle() for s, x in table.get("tokens", {}).items() if keeps_batch_statistics(x.norm)}
    hit = {site: count for site, count in counts.items() if count < THRESHOLDS["tokens"].value}
    if not hit:
        return []
    says = (
        f"{places(hit)}: batches of {min(hit.values()):.0f} rows, too few for statistics: larger batches,"
        " steps_per_update=k, sync=True over processes, or a norm of tokens"
    )
    return [Finding("tiny batches", tuple(hit), says, hit)]


def _frozen(table: Table) -> list[Finding]:
    """Running statistics that do not stand for the batches."""
    groups: dict[str, dict[str, float]] = {}
    for quantity, quadratic in (("gap_batch", False), ("gap_quadratic", True)):
        for site, gap in _over(table, quantity, "gap").items():
            norm = table[quantity][site].norm
            if _by_quadratic_means(norm) is not quadratic:
                continue
            other = _middle(table, "gap_quadratic", site)
            key = "quadratic" if quadratic else "holds" if other <= THRESHOLDS["gap_holds"].value else "neither"
            groups.setdefault(key, {})[site] = gap
    return [Finding("evaluation", tuple(hit), _frozen_words(table, key, hit), hit) for key, hit in groups.items()]


def _frozen_words(table: Table, key: str, hit: dict[str, float]) -> str:
    def worst(quantity: str) -> str:
        return f"{max(_middle(table, quantity, site) for site in hit):.3g}x"

    gap = f"off by {100 * max(hit.values()):.0f} %"
    if key == "quadratic":
        return (
            f"{places(hit)}: quadratic mean strays {worst('stray_quadratic')} from its running value: the norm will"
            f" fail at evaluation ({gap}); mix the batches better, calibrate, or keep a norm of tokens here"
        )
    ending = {
        "holds": f"quadratic mean strays {worst('stray_quadratic')}: PN-V or UN will hold",
        "neither": f"quadratic mean strays {worst('stray_quadratic')} too: keep a norm of tokens",
    }[key]
    return (
        f"{places(hit)}: batch variance strays {worst('stray_var')} from its running value, the mean"
        f" {max(_middle(table, 'stray_mean', site) for site in hit):.3g} standard deviations: BatchNorm will"
        f" fail at evaluation here ({gap}); {ending}"
    )


def _by_quadratic_means(norm: str) -> bool:
    try:
        kind = NORMS[parse(norm)[0]]
    except ValueError:
        return False
    return issubclass(kind, StatNorm) and not kind.center


def _nu(table: Table) -> list[Finding]:
    hit = {}
    for site, series in table.get("Gamma", {}).items():
        bound = table.get("Gamma_bound", {}).get(site)
        late = series.late()
        if bound is not None and late and statistics.median(late) > THRESHOLDS["Gamma"].value * bound.values[-1]:
            hit[site] = statistics.median(late) / bound.values[-1]
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


def _filtered(table: Table) -> list[Finding]:
    hit = _over(table, "filtered_rate", "filtered_rate", lambda series: series.values[-1])
    if not hit:
        return []
    says = (
        f"{places(hit)}: UN filters {100 * max(hit.values()):.0f} % of steps: it is PN-V now;"
        ' threshold="scalar", a longer window, or outlier_filtration=False'
    )
    return [Finding("filtered", tuple(hit), says, hit)]


def _exploding(table: Table) -> list[Finding]:
    found = []
    rms = {site: series for site, series in table.get("rms", {}).items() if series.late()}
    grown = {s: x.middle() / x.values[0] for s, x in rms.items() if 0 < x.values[0] < math.inf and len(x.values) > 1}
    grown = {site: factor for site, factor in grown.items() if factor > THRESHOLDS["growth"].value}
    levels = {site: series.middle() for site, series in rms.items()}
    if len(levels) > 1:
        first, (last, top) = next(iter(levels.values())), max(levels.items(), key=lambda pair: pair[1])
        if first > 0 and top / first > THRESHOLDS["depth"].value:
            says = (
                f"{places([last])}: what enters is {top / first:.3g}x as large as at the first norm: exploding depth;"
                " normalize before each sublayer, or scale down the residual branches"
            )
            found.append(Finding("exploding depth", (last,), says, {last: top / first}))
    if grown:
        says = f"{places(grown)}: the input grew {max(grown.values()):.3g}x during the run: lower the learning rate"
        found.append(Finding("exploding", tuple(grown), says, grown))
    large = {site: _top(series) for site, series in table.get("largest", {}).items()}
    large = {site: value for site, value in large.items() if value > THRESHOLDS["largest"].value}
    if large:
        says = (
            f"{places(large)}: values up to {max(large.values()):.3g}: float16 ends at 65504, use bfloat16 or float32"
        )
        found.append(Finding("large values", tuple(large), says, large))
    return found


def _dead(table: Table) -> list[Finding]:
    numbers = {site: series.middle() for site, series in table.get("dead", {}).items()}
    hit = {site: share for site, share in numbers.items() if share > THRESHOLDS["dead"].value}
    if not hit:
        return []
    says = f"{places(hit)}: {100 * max(hit.values()):.0f} % of the channels are dead: zero in every token of a batch"
    return [Finding("dead channels", tuple(hit), says, hit)]


def _spikes(table: Table) -> list[Finding]:
    series = table.get("gradient_norm", {}).get("")
    late = series.late() if series else []
    if not late or not max(late) > THRESHOLDS["spike"].value * statistics.median(late):
        return []
    factor = max(late) / max(statistics.median(late), 1e-38)
    says = (
        f"the gradient spikes to {factor:.3g}x its median: clip it, warm up longer, or normalize before each sublayer"
    )
    return [Finding("gradient spikes", ("",), says, {"": factor})]


def _gap(table: Table) -> list[Finding]:
    train, ev = (table.get(f"loss_{mode}_mode", {}).get("") for mode in ("train", "eval"))
    if train is None or ev is None or not ev.values[-1] > (1 + THRESHOLDS["lose"].value) * train.values[-1]:
        return []
    says = (
        f"the loss is {ev.values[-1]:.3g} at evaluation and {train.values[-1]:.3g} with the batches' own statistics:"
        " running statistics do not stand for the data; calibrate the model"
    )
    return [Finding("train-to-eval gap", ("",), says, {"train": train.values[-1], "eval": ev.values[-1]})]


RULES: tuple[Callable[[Table], list[Finding]], ...] = (
    _bad_batches, _padding, _tiny, _frozen, _gap, _nu, _filtered, _exploding, _dead, _spikes,
)  # fmt: skip
