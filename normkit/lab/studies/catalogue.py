"""The table of studies."""

from normkit.lab.papers.powernorm import tables as power
from normkit.lab.papers.tears import tables as tears
from normkit.lab.papers.unified import tables as unified
from normkit.lab.studies import bucketing, core, warmup
from normkit.lab.studies.study import Study

STUDIES: dict[str, Study] = {
    "pn.table1": power.TABLE1,
    "pn.table2": power.TABLE2,
    "pn.table3": power.TABLE3,
    "pn.table4": power.TABLE4,
    "pn.figure2": power.FIGURE2,
    "pn.figure3": power.FIGURE3,
    "pn.figure4": power.FIGURE4,
    "pn.figure5": power.FIGURE5,
    "pn.figure6": power.FIGURE6,
    "pn.figure7": power.FIGURE7,
    "tears.table2": tears.TABLE2,
    "tears.table3": tears.TABLE3,
    "tears.table4": tears.TABLE4,
    "tears.table5": tears.TABLE5,
    "tears.table6": tears.TABLE6,
    "tears.table7": tears.TABLE7,
    "tears.table8": tears.TABLE8,
    "tears.figure1": tears.FIGURE1,
    "tears.figure2": tears.FIGURE2,
    "tears.figure3": tears.FIGURE3,
    "tears.figure4": tears.FIGURE4,
    "un.table1": unified.TABLE1,
    "un.table2": unified.TABLE2,
    "un.table3": unified.TABLE3,
    "un.table4": unified.TABLE4,
    "un.table5": unified.TABLE5,
    "un.table6": unified.TABLE6,
    "un.table7": unified.TABLE7,
    "un.table8": unified.TABLE8,
    "un.table9": unified.TABLE9,
    "un.table10": unified.TABLE10,
    "un.figure1": unified.FIGURE1,
    "un.figure3": unified.FIGURE3,
    "un.figure4": unified.FIGURE4,
    "un.figure5": unified.FIGURE5,
    "un.figure6": unified.FIGURE6,
    "core.multi30k": core.MULTI30K_CORE,
    "core.multi30k-hour": core.MULTI30K_LONG,
    "core.iwslt14": core.IWSLT14_CORE,
    "core.ptb": core.PTB_CORE,
    "core.wikitext-2": core.WIKITEXT2_CORE,
    "core.ted-gl": core.GALICIAN_CORE,
    "core.cmudict": core.CMUDICT_CORE,
    "core.cifar10": core.CIFAR10_CORE,
    "core.cifar10-224": core.CIFAR10_SPEED,
    "warmup.multi30k": warmup.MULTI30K_WARMUP,
    "warmup.iwslt14": warmup.IWSLT14_WARMUP,
    "bucketing.multi30k": bucketing.MULTI30K_BUCKETING,
    "bucketing.cmudict": bucketing.CMUDICT_BUCKETING,
}


def listing() -> str:
    """All studies, a line each: where from, at what scales, and what is compared."""
    width = max(map(len, STUDIES))
    lines = []
    for name, study in STUDIES.items():
        runs = ", ".join(study.scales) or "printed figures only"
        lines.append(f"{name:<{width}}  {study.title} [{runs}]")
    return "\n".join(lines)
