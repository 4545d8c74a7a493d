"""Studies: the share of BatchNorm's failure on text that is due to bucketing by length.

Translation batches usually hold sentences of similar length, because that wastes no padding. But the statistics of such
a batch are those of short or of long sentences, while running statistics are of all sentences. Shuffled batches with
the same number of tokens show which part of the gap, and of BatchNorm's loss, the data pipeline causes. Donor batches,
other training items chosen by length, show what a model reads from the statistics of its batch.
"""

from normkit_papers.powernorm.recipes import mt_iwslt14_pocket
from normkit_papers.recipes import CMUDICT, MULTI30K, mt_multi30k
from normkit_papers.study import Base, Bases, Row, Settings, Study, columns

NORMS = ("batch", "pnv", "mabn", "power(groups=1)", "un", "layer")
WAYS: dict[str, Settings] = {
    "bucketed": {},
    "bucketed by source": {"bucket_by": "source"},
    "shuffled": {"bucketing": False},
}
DISTANCES = {"mean": "distance_mean", "variance": "distance_var", "quadratic mean": "distance_quadratic"}
OLD = "of each test batch itself (until 0.2)"


def _rows(norms: tuple[str, ...], ways: tuple[str, ...]) -> tuple[Row, ...]:
    return tuple(Row(f"{norm}, {way}", {"model.norm": norm, **WAYS[way]})
                 for norm in norms for way in ways)  # fmt: skip


def _study(id: str, data: str, metric: str, base: Bases) -> Study:
    kinds = {"running": "running", "calibrated": "calibrated", "donors of the same lengths": "donors", OLD: "batch"}
    return Study(
        id=id,
        title=f"batches bucketed by length or shuffled, {data}",
        note="The same number of symbols a batch. Distances are PowerNorm's Figure 2: batch against running statistics"
        " of the first norm, median over the run. The statistics of a test batch itself depend on its right answers.",
        rows=_rows(NORMS, ("bucketed", "shuffled")),
        columns=(
            *columns(base, {f"{metric.upper()} {title}": f"{metric} {kind}" for title, kind in kinds.items()}),
            *columns(base, {f"distance, {title}": name for title, name in DISTANCES.items()}),
        ),
    )


MULTI30K_BUCKETING = _study("bucketing.multi30k", "Multi30k De-En", "bleu", MULTI30K)
CMUDICT_BUCKETING = _study("bucketing.cmudict", "CMU Pronouncing Dictionary", "per", CMUDICT)

STATISTICS = {
    "running": "running",
    "calibrated": "calibrated",
    "same lengths": "donors",
    "same source length": "donors source",
    "target two longer": "donors longer",
    "target two shorter": "donors shorter",
    "any lengths": "donors any",
    "same lengths, encoder only": "donors encoder",
    "same lengths, decoder only": "donors decoder",
    "same lengths, first layers only": "donors first",
}
SHORT: Settings = {"steps": 600, "warmup": 75, "valid_every": 300, "test_items": 500}


def _length(id: str, data: str, metric: str, base: Bases) -> Study:
    lengths = list(STATISTICS)[2:6]
    losses = STATISTICS if metric == "bleu" else ()  # BLEU of short runs is coarse
    return Study(
        id=id,
        title=f"test batches with the statistics of other training items, chosen by length, {data}",
        note="Greedy search. Symbols: mean length of an output.",
        rows=_rows(("batch", "pnv", "un", "renorm", "power(groups=0)", "layer"), tuple(WAYS)),
        columns=(
            *columns(base, {f"{metric.upper()}, {title}": f"{metric} {kind}" for title, kind in STATISTICS.items()}),
            *columns(base, {f"symbols, {title}": f"symbols {STATISTICS[title]}" for title in lengths}),
            *columns(base, {f"loss, {title}": f"loss {STATISTICS[title]}" for title in losses}),
        ),
    )


CMUDICT_LENGTH = _length(
    "length.cmudict", "CMU Pronouncing Dictionary", "per",
    {"pocket": CMUDICT["pocket"]._replace(name="cmudict.length")},
)  # fmt: skip
MULTI30K_LENGTH, IWSLT14_LENGTH = (
    _length(f"length.{name}", data, "bleu", {"pocket": Base(f"{name}.de-en.short", recipe, SHORT)})
    for name, data, recipe in (
        ("multi30k", "Multi30k De-En, 600 steps", mt_multi30k),
        ("iwslt14", "IWSLT14 De-En, 600 steps", mt_iwslt14_pocket),
    )
)  # fmt: skip
