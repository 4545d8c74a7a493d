"""Tasks: one row each, with every fact that is specific to the task.

A row names its code as `module:function` and imports it when it is used. So reports, which need no PyTorch, and the
packages below `train` can read this table too.
"""

import dataclasses
import math
import pkgutil
from typing import Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Metric:
    """A score on the test split."""

    key: str
    """Key in result files."""
    name: str
    """Name in tables and sentences."""
    better: Literal[-1, 1]
    """1 if higher is better, -1 if lower is better."""


PER = Metric(key="per", name="PER", better=-1)
BLEU = Metric(key="bleu", name="BLEU", better=1)
PERPLEXITY = Metric(key="perplexity", name="perplexity", better=-1)
ACCURACY = Metric(key="accuracy", name="accuracy", better=1)
BOX_AP = Metric(key="box_ap", name="box AP", better=1)
MASK_AP = Metric(key="mask_ap", name="mask AP", better=1)
LOSS = Metric(key="loss", name="loss", better=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Code, metrics and settings of a task."""

    module: str
    """`LightningModule(run, model, data)` that trains and scores."""
    model: str
    """`(config, vocabularies) -> nn.Module`."""
    data: str
    """`(run, on_stage) -> reader`: checks that the data exists; calling the reader reads it."""
    metrics: tuple[Metric, ...]
    """The first one decides comparisons."""
    part: str = ""
    """Submodule that contains the norms; empty for the whole model."""

    def load(self, part: Literal["module", "model", "data"]) -> Any:
        """Import and return the code of a part.

        >>> TASKS["lm"].load("module").__name__
        'Language'
        """
        return pkgutil.resolve_name(f"normkit_papers.train.{getattr(self, part)}")


TASKS: dict[str, TaskSpec] = {
    "g2p": TaskSpec(
        module="translation:Translation", model="build:seq2seq",
        data="source:sequences", metrics=(PER,),
    ),
    "mt": TaskSpec(
        module="translation:MachineTranslation", model="build:seq2seq",
        data="source:corpus", metrics=(BLEU,),
    ),
    "lm": TaskSpec(
        module="language:Language", model="build:language_model",
        data="source:corpus", metrics=(PERPLEXITY,),
    ),
    "digits": TaskSpec(
        module="images:Classification", model="build:digit_classifier",
        data="source:sequences", metrics=(ACCURACY,),
    ),
    "images": TaskSpec(
        module="images:ImageClassification", model="build:image_classifier",
        data="source:images", metrics=(ACCURACY,),
    ),
    "detection": TaskSpec(
        module="detection:Detection", model="build:object_detector",
        data="source:annotated_images", metrics=(BOX_AP, MASK_AP), part="backbone",
    ),
}  # fmt: skip
"""By name, as in `Run.task`."""

METRICS: tuple[Metric, ...] = (*dict.fromkeys(metric for task in TASKS.values() for metric in task.metrics), LOSS)
"""All metrics, in the order of the tasks; the loss, which all tasks have, comes last."""


def perplexity(loss: float) -> float:
    """Return the exponential of a mean loss.

    Losses above 700 count as 700, because their exponential would overflow.

    >>> perplexity(0.0), perplexity(1e9) == perplexity(700.0)
    (1.0, True)
    """
    return math.exp(min(loss, 700.0))
