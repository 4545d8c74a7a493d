"""Predict from recorded rows whether batch statistics would work at norms that keep none."""

import math
from collections.abc import Iterable

from normkit.norms import SwitchableNorm
from normkit.watch.faults import LIMITS
from normkit.watch.length import target_share
from normkit.watch.recording import Recording, Row, as_recording
from normkit.watch.row_names import format_sites, keeps_batch_statistics, norm_class

UNKNOWN = (
    "no advice on batch statistics: record gap_batch and gap_quadratic at two steps or more;"
    ' nk.record(model, quantities="default") does'
)


def advise(rows: Iterable[Row] | Recording) -> list[str]:
    """Predict whether batch statistics would hold at evaluation, at norms that keep none.

    "Not known" are shares that `fails` does not decide, lengths not recorded, and gaps above those of runs that held.

    >>> rows = [Row(1, "norm", "LayerNorm", f"gap_{kind}", 0.9) for kind in ("batch", "quadratic")]
    >>> print(*advise(rows))
    norm: BatchNorm would be off by 90 % at evaluation, PN-V and UN by 90 %; whether the model would hold is not known
    """
    recording = as_recording(rows)
    norms = recording.norms().items()  # without `switchable`, of whose statistics a share are the batch's
    sites = [site for site, norm in norms if not keeps_batch_statistics(norm) and norm_class(norm)[0] != SwitchableNorm]
    gaps = {site: (recording.middle("gap_batch", site), recording.middle("gap_quadratic", site)) for site in sites}
    lacking = [site for site, pair in gaps.items() if any(map(math.isnan, pair))]
    known = [site for site in sites if site not in lacking]
    found = []
    if known:
        batch, quadratic = (max(gaps[site][side] for site in known) for side in (0, 1))
        found.append(
            f"{format_sites(known)}: BatchNorm would be off by {100 * batch:.0f} % at evaluation, PN-V and UN by"
            f" {100 * quadratic:.0f} %; {_prediction(target_share(recording), batch, quadratic)}"
        )
    if lacking:
        found.append(f"{format_sites(lacking)}: {UNKNOWN}")
    return found


def fails(share: float, limit: float = LIMITS["target_share"]) -> bool | None:
    """Predict whether BatchNorm and PN-V fail, as models read the target's length.

    None within a factor of two of the limit, where some runs failed and others held (`benchmarks/advice.py`).
    """
    return True if share >= 2 * limit else False if share <= limit / 2 else None


def _prediction(share: float, batch: float, quadratic: float) -> str:
    """Predict by the share of target lengths that is between batches, and the largest gaps."""
    lengths = f"{100 * share:.0f} % of the variance of target lengths, given source lengths, is between batches"
    if fails(share):
        un = "UN would hold" if quadratic <= LIMITS["gap"] else "of UN this is not known"
        return f"BatchNorm and PN-V would fail, as {lengths}; {un}"
    if fails(share) is False and max(batch, quadratic) <= LIMITS["gap"]:
        return f"all three would hold, as {lengths}" if share else "all three would hold"
    return "whether the model would hold is not known"
