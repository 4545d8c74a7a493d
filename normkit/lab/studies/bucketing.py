"""Study: the share of BatchNorm's failure on text that is due to bucketing by length.

Translation batches usually hold sentences of similar length, because that wastes no padding. But the statistics of such
a batch are those of short or of long sentences, while running statistics are of all sentences. Shuffled batches with
the same number of tokens show which part of the gap, and of BatchNorm's loss, the data pipeline causes.
"""

from normkit.lab.papers.powernorm.recipes import mt_iwslt14_pocket
from normkit.lab.recipes import CMUDICT, MULTI30K, mt_multi30k
from normkit.lab.study import Base, Bases, Column, Row, Settings, Study

NORMS = ("batch", "pnv", "mabn", "power(groups=1)", "un", "layer")
DISTANCES = {"mean": "distance_mean", "variance": "distance_var", "quadratic mean": "distance_quadratic"}


def _study(id: str, data: str, metric: str, base: Bases) -> Study:
    scores = ("running", "calibrated", "batch")
    return Study(
        id=id,
        title=f"batches bucketed by length or shuffled, {data}",
        note="The same number of symbols a batch. Distances are PowerNorm's Figure 2: batch against running statistics"
        " of the first norm, median over the run.",
        rows=tuple(
            Row(label=f"{norm}, {how}", settings={"model.norm": norm, "bucketing": how == "bucketed"})
            for norm in NORMS
            for how in ("bucketed", "shuffled")
        ),
        columns=(
            *(Column(title=f"{metric.upper()} {kind}", metric=f"{metric} {kind}", base=base) for kind in scores),
            *(Column(title=f"distance, {title}", metric=name, base=base) for title, name in DISTANCES.items()),
        ),
    )


MULTI30K_BUCKETING = _study("bucketing.multi30k", "Multi30k De-En", "bleu", MULTI30K)
CMUDICT_BUCKETING = _study("bucketing.cmudict", "CMU Pronouncing Dictionary", "per", CMUDICT)

BY: dict[str, Settings] = {
    "by both lengths": {},
    "by source length": {"bucket_by": "source"},
    "any lengths": {"bucketing": False},
}
SHORT: Settings = {"steps": 600, "warmup": 75, "valid_every": 300, "test_items": 500}


def _length(id: str, data: str, metric: str, base: Bases, norms: tuple[str, ...], ways: tuple[str, ...]) -> Study:
    return Study(
        id=id,
        title=f"statistics of batches of other lengths, {data}",
        rows=tuple(
            Row(label=f"{norm}, {way}", settings={"model.norm": norm, **BY[way]}) for norm in norms for way in ways
        ),
        columns=(Column(title=f"{metric.upper()} running", metric=f"{metric} running", base=base),),
    )


CMUDICT_LENGTH = _length(
    "length.cmudict", "CMU Pronouncing Dictionary", "per", CMUDICT,
    ("batch", "pnv", "renorm", "un", "power(groups=0)", "layer"), tuple(BY),
)  # fmt: skip
MULTI30K_LENGTH, IWSLT14_LENGTH = (
    _length(
        f"length.{name}", data, "bleu", {"pocket": Base(f"{name}.de-en.short", recipe, SHORT)},
        ("batch", "pnv", "un"), ("by both lengths", "any lengths"),
    )
    for name, data, recipe in (
        ("multi30k", "Multi30k De-En, 600 steps", mt_multi30k),
        ("iwslt14", "IWSLT14 De-En, 600 steps", mt_iwslt14_pocket),
    )
)  # fmt: skip
