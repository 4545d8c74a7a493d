"""Study: length of the warm-up of statistics.

During their warm-up `un`, `mabn` and `power(groups=0)` are `pnv`, with its exact gradient. Afterwards they use
statistics of past batches and past gradients, which is right if both change slowly. At the peak of the learning rate,
where its own warm-up ends, they do not.
"""

from normkit.lab.papers.powernorm.recipes import IWSLT14
from normkit.lab.recipes import MULTI30K
from normkit.lab.studies.core import IWSLT14_CORE, MULTI30K_CORE
from normkit.lab.study import Bases, Column, Row, Study

LONGER = ("un", "un(warmup=600)", "power(groups=0)", "power(groups=0, warmup=600)")


def _study(id: str, data: str, base: Bases, norms: tuple[str, ...], columns: tuple[Column, ...], note: str) -> Study:
    return Study(
        id=id,
        title=f"statistics that warm up as long as the learning rate, 200 steps, or longer, {data}",
        note=note,
        rows=tuple(Row(label=norm, settings={"model.norm": norm}) for norm in ("pnv", *norms)),
        columns=tuple(Column(title=c.title, metric=c.metric, base={"pocket": base["pocket"]}) for c in columns),
    )


MULTI30K_WARMUP = _study(
    "warmup.multi30k", "Multi30k De-En", MULTI30K, LONGER,
    (*MULTI30K_CORE.columns, Column(title="valid perplexity", metric="perplexity valid")), MULTI30K_CORE.note,
)  # fmt: skip
IWSLT14_WARMUP = _study(
    "warmup.iwslt14", "IWSLT14 De-En", IWSLT14, (*LONGER, "mabn", "mabn(warmup=600)"), IWSLT14_CORE.columns,
    IWSLT14_CORE.note,
)  # fmt: skip
