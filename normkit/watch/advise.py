"""Advice on batch statistics for norms that keep none, by what was recorded there."""

import math
from collections.abc import Iterable

from normkit.watch.recording import Recording, Row, as_recording
from normkit.watch.row_names import format_sites, keeps_batch_statistics

UNKNOWN = (
    "no advice on batch statistics: record gap_batch and gap_quadratic, at two steps at least"
    ' (nk.record(model, quantities="default"))'
)


def advise(rows: Iterable[Row] | Recording) -> list[str]:
    """State how far batch statistics would be from running ones at norms that keep none.

    It makes no prediction: no rule on these numbers was right in nine of ten of our runs (docs/log.md).

    >>> rows = [Row(1, "norm", "LayerNorm", f"gap_{kind}", 0.9) for kind in ("batch", "quadratic")]
    >>> print(*advise(rows))
    norm: BatchNorm would be off by 90 % at evaluation, PN-V and UN by 90 %; whether a model bears that is not known
    """
    recording = as_recording(rows)
    sites = [site for site, norm in recording.norms().items() if not keeps_batch_statistics(norm)]
    gaps = {site: (recording.middle("gap_batch", site), recording.middle("gap_quadratic", site)) for site in sites}
    lacking = [site for site, pair in gaps.items() if any(map(math.isnan, pair))]
    known = [site for site in sites if site not in lacking]
    found = [f"{format_sites(lacking)}: {UNKNOWN}"] if lacking else []
    if known:
        batch, quadratic = (max(gaps[site][side] for site in known) for side in (0, 1))
        shares = [share for site in known if not math.isnan(share := recording.middle("length_share", site))]
        length = f"; batch length explains up to {100 * max(shares):.0f} % of it" if shares else ""
        found.insert(
            0,
            f"{format_sites(known)}: BatchNorm would be off by {100 * batch:.0f} % at evaluation, PN-V and UN by"
            f" {100 * quadratic:.0f} %{length}; whether a model bears that is not known",
        )
    return found
