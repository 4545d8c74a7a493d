"""Would batch statistics hold where a norm keeps none? By the gaps that were recorded there."""

import math
from collections.abc import Iterable

from normkit.watch.faults import THRESHOLDS
from normkit.watch.rows import Row
from normkit.watch.series import Table, keeps_batch_statistics, middle, norms, places, tabulate

UNKNOWN = (
    "what batch statistics would do here is not known: record gap_batch and gap_quadratic, at two steps at least"
    ' (nk.record(model, quantities="default"))'
)


def advise(rows: Iterable[Row] | Table) -> list[str]:
    """What batch statistics would do at the norms that keep none: a line for those places that are alike.

    >>> rows = [Row(1, "norm", "LayerNorm", f"gap_{kind}", 0.9) for kind in ("batch", "quadratic")]
    >>> print(*advise(rows))
    norm: BatchNorm would fail at evaluation here (off by 90 %), and so would PN-V and UN (90 %): keep a norm of tokens
    """
    table = tabulate(rows)
    alike: dict[str, dict[str, tuple[float, float]]] = {}
    for site, norm in norms(table).items():
        if not keeps_batch_statistics(norm):
            gaps = middle(table, "gap_batch", site), middle(table, "gap_quadratic", site)
            alike.setdefault(_verdict(*gaps), {})[site] = gaps
    return [
        f"{places(gaps)}: "
        + verdict.format(*(f"{100 * max(column):.0f} %" for column in zip(*gaps.values(), strict=True)))
        for verdict, gaps in alike.items()
    ]


def _verdict(gap: float, quadratic: float) -> str:
    fails, holds = THRESHOLDS["gap"].value, THRESHOLDS["gap_holds"].value
    if math.isnan(gap) or math.isnan(quadratic):
        return UNKNOWN
    if gap <= fails:
        others = "too" if quadratic <= fails else "would not"
        return f"BatchNorm would hold at evaluation here (off by {{0}}), PN-V and UN {others} ({{1}})"
    ending = (
        "; PN-V or UN would hold ({1})" if quadratic <= holds
        else "; PN-V and UN are in doubt ({1})" if quadratic <= fails
        else ", and so would PN-V and UN ({1}): keep a norm of tokens"
    )  # fmt: skip
    return f"BatchNorm would fail at evaluation here (off by {{0}}){ending}"
