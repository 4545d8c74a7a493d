"""Whether a difference is more than chance: two systems on the same sentences, one system over several seeds."""

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from normkit.data.corpora import Corpus
from normkit.train.bleu import counted, metric


class Difference(NamedTuple):
    """BLEU of two systems, and the p-value of their difference."""

    first: float
    second: float
    p: float


def paired(
    first: Sequence[str], second: Sequence[str], references: Sequence[str], corpus: Corpus, samples: int = 1000
) -> Difference:
    """Paired bootstrap of two systems' translations of the same sentences (Koehn 2004), by sacrebleu.

    BLEU is counted as the corpus' papers do. ValueError where the three are not of one length.
    """
    if not len(first) == len(second) == len(references) > 0:
        raise ValueError(
            f"{len(first)} and {len(second)} translations for {len(references)} references; needs as many of each"
        )
    from sacrebleu.significance import PairedTest

    texts = [counted(lines, corpus) for lines in (first, second, references)]
    systems: list[tuple[str, Sequence[str]]] = [("first", texts[0]), ("second", texts[1])]
    test = PairedTest(systems, {"BLEU": metric(corpus)}, [texts[2]], test_type="bs", n_samples=samples)
    one, two = test()[1]["BLEU"]
    if isinstance(one, str) or isinstance(two, str) or two.p_value is None:
        raise TypeError("sacrebleu's paired test gave no result")
    return Difference(one.score, two.score, two.p_value)


def read_outputs(folder: str | Path, kind: str = "beam") -> list[str]:
    """What a run translated its test split as; `kind` is a kind of its scores. ValueError where there is none."""
    path = Path(folder) / "outputs" / f"{kind}.txt"
    if not path.is_file():
        raise ValueError(f"{path} is missing; runs of task mt write it when they end")
    return path.read_text(encoding="utf8").removesuffix("\n").split("\n")


def interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Mean of several seeds, and half the width of its confidence interval (Student's t; nan of a single value).

    >>> mean, half = interval([31.0, 32.0, 33.0])
    >>> mean, round(half, 2)
    (32.0, 2.48)
    """
    if not values:
        raise ValueError("an interval needs at least one value")
    if len(values) == 1:
        return values[0], math.nan
    from scipy import stats

    quantile = float(stats.t.ppf((1 + level) / 2, len(values) - 1))
    return statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))
