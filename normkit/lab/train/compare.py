"""Whether a difference is more than chance: two systems on the same sentences, one system over several seeds."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from normkit.lab.data.corpora import CORPORA, Corpus, locate
from normkit.lab.report import results
from normkit.lab.report.settings import flat
from normkit.lab.tasks import TASKS
from normkit.lab.train.bleu import counted, metric
from normkit.lab.train.config import Run

SCORES = tuple(dict.fromkeys((task.decided_by, task.metrics[0].key) for task in TASKS.values()))
"""Kind and name of what runs are compared by: the first that they have."""
SEARCHES = {"beam": "beam search", "running": "running statistics"}


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
    # where no resampling differs, sacrebleu counts none that is beyond the difference, and calls it significant
    return Difference(one.score, two.score, 1.0 if one.score == two.score else two.p_value)


def read_outputs(folder: str | Path, kind: str = "beam") -> list[str]:
    """What a run translated its test split as; `kind` is a kind of its scores. ValueError where there is none."""
    path = Path(folder) / "outputs" / f"{kind}.txt"
    if not path.is_file():
        raise ValueError(f"{path} is missing; runs of task mt write it when they end")
    return path.read_text(encoding="utf8").removesuffix("\n").split("\n")


def compared(folders: Sequence[Path]) -> list[str]:
    """What is known of the difference of runs, a line each; a folder is a run's, or holds those of its seeds.

    First the mean of each with its confidence interval over seeds; then, of translations, the paired bootstrap of each
    against the first, seed by seed. ValueError where a folder has runs of several settings, or of no score in common.
    """
    seeds = [_seeds(Path(folder)) for folder in folders]
    every = [result["scores"] for each in seeds for _, result in each.values()]
    common = [(kind, name) for kind, name in SCORES if all(name in scores.get(kind, {}) for scores in every)]
    if not common:
        raise ValueError("these runs have no score in common; needs finished runs of one task")
    kind, name = common[0]
    lines = []
    for folder, each in zip(folders, seeds, strict=True):
        mean, half = interval(_values(each, kind, name))
        spread = "one seed" if len(each) == 1 else f"± {half:.2f}, 95 % interval of {len(each)} seeds"
        lines.append(f"{folder}: {name} by {SEARCHES.get(kind, kind)} {mean:.2f} ({spread})")
    for folder, each in zip(folders[1:], seeds[1:], strict=True):
        said = apart(_values(each, kind, name), _values(seeds[0], kind, name))
        lines.append(f"{folder} less {folders[0]}: {said}")
    for folder, each in zip(folders[1:], seeds[1:], strict=True):
        for seed in sorted(each.keys() & seeds[0].keys()) if name == "bleu" else []:
            (one, result), (two, _) = seeds[0][seed], each[seed]
            references = read_outputs(one, "reference")
            if references != read_outputs(two, "reference"):
                raise ValueError(f"{one} and {two} translated other sentences; compare runs on the same test split")
            data = result["run"]["data"]
            corpus = CORPORA[data] if data in CORPORA else locate(data).corpus
            found = paired(read_outputs(one), read_outputs(two), references, corpus)
            said = f"{found.second:.2f} against {found.first:.2f}, p = {found.p:.3f}"
            lines.append(
                f"{folder} and {folders[0]}, seed {seed}: {said} (paired bootstrap, {len(references):,} lines)"
            )
    return lines


def apart(first: Sequence[float], second: Sequence[float]) -> str:
    """The difference of two means over seeds with its 95 % interval (Welch's t), in words.

    >>> apart([31.0, 32.0, 33.0], [31.5, 32.0, 33.5])
    '-0.33 (95 % interval -2.65 to 1.98): cannot be told apart'
    >>> apart([31.0], [33.0])
    '-2.00; whether that is chance takes two seeds of each (--seed)'
    """
    difference = statistics.fmean(first) - statistics.fmean(second)
    if min(len(first), len(second)) == 1:
        return f"{difference:.2f}; whether that is chance takes two seeds of each (--seed)"
    if statistics.variance(first) == statistics.variance(second) == 0:
        return f"{difference:.2f}, the same in all seeds"
    from scipy import stats

    low, high = stats.ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    verdict = "cannot be told apart" if low <= 0 <= high else "more than chance"
    return f"{difference:.2f} (95 % interval {low:.2f} to {high:.2f}): {verdict}"


def _values(seeds: dict[int, tuple[Path, dict[str, Any]]], kind: str, name: str) -> list[float]:
    return [result["scores"][kind][name] for _, result in seeds.values()]


def _seeds(folder: Path) -> dict[int, tuple[Path, dict[str, Any]]]:
    """The runs of a folder by their seeds; ValueError where they differ in more."""
    there = results.find([folder])
    found = {result["run"]["seed"]: (path, result) for path, result in there.items()}
    defaults = flat(json.loads(Run(name="", task="", data="", steps=1).to_json()))  # of what older runs lack
    settings = [{**defaults, **flat({**result["run"], "seed": 0, "name": ""})} for _, result in found.values()]
    if settings.count(settings[0]) < len(settings) or len(found) < len(there):
        raise ValueError(f"{folder} has runs of several settings; name the folder of one, or of its seeds")
    return found


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
