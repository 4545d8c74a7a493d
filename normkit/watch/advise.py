"""Advice on batch statistics for norms that keep none, by the gaps recorded there."""

import math
from collections.abc import Iterable

from normkit.watch.faults import THRESHOLDS
from normkit.watch.recording import Recording, Row, as_recording
from normkit.watch.row_names import format_sites, keeps_batch_statistics

UNKNOWN = (
    "no advice on batch statistics: record gap_batch and gap_quadratic, at two steps at least"
    ' (nk.record(model, quantities="default"))'
)


def advise(rows: Iterable[Row] | Recording) -> list[str]:
    """Predict what batch statistics would do at the norms that keep none.

    One line for sites that are alike.

    >>> rows = [Row(1, "norm", "LayerNorm", f"gap_{kind}", 0.9) for kind in ("batch", "quadratic")]
    >>> print(*advise(rows))
    norm: BatchNorm would fail at evaluation here (off by 90 %), and so would PN-V and UN (90 %): keep a per-token norm
    """
    recording = as_recording(rows)
    alike: dict[str, dict[str, tuple[float, float]]] = {}
    for site, norm in recording.norms().items():
        if not keeps_batch_statistics(norm):
            gaps = recording.middle("gap_batch", site), recording.middle("gap_quadratic", site)
            alike.setdefault(_verdict(*gaps), {})[site] = gaps
    return [
        f"{format_sites(gaps)}: "
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
        else ", and so would PN-V and UN ({1}): keep a per-token norm"
    )  # fmt: skip
    return f"BatchNorm would fail at evaluation here (off by {{0}}){ending}"
