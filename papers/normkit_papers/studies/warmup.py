"""Studies: length of the warm-up of statistics, by hand and automatic.

During their warm-up `un`, `mabn` and `power(groups=0)` are `pnv`, with its exact gradient. Afterwards they use
statistics of past batches and past gradients, which is right if both change slowly. At the peak of the learning rate,
where its own warm-up ends, they do not.
"""

import dataclasses

from normkit_papers.studies.core import CMUDICT_CORE, IWSLT14_CORE, MULTI30K_CORE, PTB_CORE, THIRD
from normkit_papers.studies.papers import BASES
from normkit_papers.study import Base, Column, Settings, Study, norm_rows, override, with_options

TIMES = (3, 10)  # warm-ups of statistics, relative to that of the learning rate


def _study(id: str, data: str, base: Base, columns: tuple[Column, ...], options: Settings, note: str = "") -> Study:
    run = override(base.recipe(), base.settings)
    longer: list[Settings] = [{"warmup": times * run.warmup} for times in TIMES if times * run.warmup <= run.steps]
    warmups: list[Settings] = [{}, *longer, {"warmup": "auto"}]
    norms = [
        with_options(norm, {**warmup, **options}) for norm in ("un", "power(groups=0)", "mabn") for warmup in warmups
    ]
    return Study(
        id=f"warmup.{id}",
        title=f"statistics that warm up as long as the learning rate, {run.warmup} steps, or longer, {data}",
        note=f"{note} {WHOLE}".strip(),
        rows=norm_rows("layer", "pnv", *norms),
        columns=tuple(dataclasses.replace(column, base={"pocket": base}) for column in columns),
    )


WHOLE = "Ten times the learning rate's warm-up is the whole run: then un is pnv."
VALID = Column("valid perplexity", "perplexity valid")
BLEU = (Column("BLEU", "bleu"), Column("BLEU greedy", "bleu running"))
ACCURACY = (
    Column("accuracy", "accuracy"), Column("accuracy, calibrated", "accuracy calibrated"),
)  # fmt: skip
FILTERED: Settings = {"outlier_filtration": True}  # as the paper for images

WARMUPS = (
    _study("cmudict", "CMU Pronouncing Dictionary", BASES["cmudict"]["pocket"], CMUDICT_CORE.columns, {}),
    _study("multi30k", "Multi30k De-En", BASES["multi30k"]["pocket"], (*MULTI30K_CORE.columns, VALID), {}),
    _study("iwslt14", "IWSLT14 De-En", BASES["iwslt14"]["pocket"], IWSLT14_CORE.columns, {}, THIRD),
    _study("ted-gl", "TED gl-en", BASES["ted_gl"]["pocket"], (*BLEU, VALID), {}),
    _study("ptb", "PTB, tensorized language model, 1,000 steps", BASES["ptb_short"]["pocket"], PTB_CORE.columns, {}),
    _study("cifar10", "CIFAR-10, tiny ViT", BASES["cifar10"]["pocket"], ACCURACY, FILTERED),
    _study("resnet20", "CIFAR-10, ResNet-20", BASES["resnet20"]["pocket"], ACCURACY, FILTERED),
    _study(
        "pennfudan", "Penn-Fudan, Mask R-CNN", BASES["mask_rcnn"]["pocket"],
        (Column("box AP", "box AP"), Column("mask AP", "mask AP")), FILTERED,
    ),
)  # fmt: skip
