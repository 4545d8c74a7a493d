"""Studies: length of the warm-up of statistics, by hand and automatic.

During their warm-up `un`, `mabn` and `power(groups=0)` are `pnv`, with its exact gradient. Afterwards they use
statistics of past batches and past gradients, which is right if both change slowly. At the peak of the learning rate,
where its own warm-up ends, they do not.
"""

import dataclasses
from typing import Any

from normkit_papers.studies.tables import BASES, NOTES, columns, rows
from normkit_papers.study import Study, override, with_options

TIMES = (3, 10)  # warm-ups of statistics, relative to that of the learning rate
FILTERED = {"outlier_filtration": True}  # as the paper for images


def _study(id: str, data: str, base: str, shown: list[Any], options: Any = (), note: str = "") -> Study:
    start = BASES[base]["pocket"]
    run = override(start.recipe(), start.settings)
    longer = [{"warmup": times * run.warmup} for times in TIMES if times * run.warmup <= run.steps]
    norms = [
        with_options(norm, {**warmup, **dict(options)})
        for norm in ("un", "power(groups=0)", "mabn")
        for warmup in ({}, *longer, {"warmup": "auto"})
    ]
    return Study(
        id=f"warmup.{id}",
        title=f"statistics that warm up as long as the learning rate, {run.warmup} steps, or longer, {data}",
        note=" ".join([*note.split(), "Ten times the learning rate's warm-up is the whole run: then un is pnv."]),
        rows=tuple(rows(["layer", "pnv", *norms])),
        columns=tuple(dataclasses.replace(column, base={"pocket": start}) for column in columns(shown)),
    )


WARMUPS = (
    _study("cmudict", "CMU Pronouncing Dictionary", "cmudict", ["per"]),
    _study("multi30k", "Multi30k De-En", "multi30k", ["bleu", "valid"]),
    _study("iwslt14", "IWSLT14 De-En", "iwslt14", ["bleu", "valid"], note=NOTES["a third"]),
    _study("ted-gl", "TED gl-en", "ted_gl", [{"BLEU": "bleu", "BLEU greedy": "bleu running"}, "valid"]),
    _study("ptb", "PTB, tensorized language model, 1,000 steps", "ptb_short", ["ptb"]),
    _study("cifar10", "CIFAR-10, tiny ViT", "cifar10", ["accuracy"], FILTERED),
    _study("resnet20", "CIFAR-10, ResNet-20", "resnet20", ["accuracy"], FILTERED),
    _study("pennfudan", "Penn-Fudan, Mask R-CNN", "mask_rcnn", ["box AP", "mask AP"], FILTERED),
)
