"""How long must statistics warm up? Until then `un` and `power(groups=0)` are `pnv`, with its exact gradient.

Afterwards they divide by what past batches say and remove what past gradients say, which is right where both change
slowly. At the peak of the learning rate, where its own warm-up ends, they do not.
"""

from normkit.studies.bases import MULTI30K
from normkit.studies.core import MULTI30K_CORE
from normkit.studies.study import Column, Row, Study

MULTI30K_WARMUP = Study(
    id="warmup.multi30k",
    title="statistics that warm up as long as the learning rate, 200 steps, or longer, Multi30k De-En",
    rows=tuple(
        Row(label=norm, settings={"model.norm": norm})
        for norm in ("pnv", "un", "un(warmup=600)", "power(groups=0)", "power(groups=0, warmup=600)")
    ),
    columns=tuple(
        Column(title=column.title, metric=column.metric, base={"pocket": MULTI30K["pocket"]})
        for column in (*MULTI30K_CORE.columns, Column(title="valid perplexity", metric="perplexity valid"))
    ),
)
