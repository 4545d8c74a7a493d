"""Studies: the share of BatchNorm's failure on text that is due to bucketing by length.

Translation batches usually hold sentences of similar length, because that wastes no padding. But the statistics of such
a batch are those of short or of long sentences, while running statistics are of all sentences. Shuffled batches with
the same number of tokens show which part of the gap, and of BatchNorm's loss, the data pipeline causes.
"""

from normkit_papers.bases import CMUDICT, MULTI30K
from normkit_papers.study import Bases, Row, Settings, Study, columns

NORMS = ("batch", "pnv", "mabn", "power(groups=1)", "un", "layer")
WAYS: dict[str, Settings] = {"bucketed": {}, "shuffled": {"bucketing": False}}
DISTANCES = {"mean": "distance_mean", "variance": "distance_var", "quadratic mean": "distance_quadratic"}


def _study(id: str, data: str, metric: str, base: Bases) -> Study:
    kinds = ("running", "calibrated")
    return Study(
        id=id,
        title=f"batches bucketed by length or shuffled, {data}",
        note="The same number of symbols a batch. Distances are PowerNorm's Figure 2: batch against running statistics"
        " of the first norm, median over the run.",
        rows=tuple(
            Row(f"{norm}, {way}", {"model.norm": norm, **settings}) for norm in NORMS for way, settings in WAYS.items()
        ),
        columns=(
            *columns(base, {f"{metric.upper()} {kind}": f"{metric} {kind}" for kind in kinds}),
            *columns(base, {f"distance, {title}": name for title, name in DISTANCES.items()}),
        ),
    )


MULTI30K_BUCKETING = _study("bucketing.multi30k", "Multi30k De-En", "bleu", MULTI30K)
CMUDICT_BUCKETING = _study("bucketing.cmudict", "CMU Pronouncing Dictionary", "per", CMUDICT)
