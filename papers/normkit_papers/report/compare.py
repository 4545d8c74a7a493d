"""Comparison of runs: means over seeds, and translations of the same sentences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normkit._util import truncate
from normkit_papers import results
from normkit_papers.report.seeds import difference, interval
from normkit_papers.report.settings import job, split
from normkit_papers.tasks import TASKS

SCORES = tuple(dict.fromkeys((task.decided_by, task.metrics[0].key) for task in TASKS.values()))
"""Kind and name of scores; runs are compared by the first one that all have."""
SAMPLES = 1000  # of the bootstrap


def compare(folders: Sequence[Path]) -> list[str]:
    """Compare runs with the first, a line each: means over seeds, their differences, and for translations p-values.

    Args:
        folders: Folders of runs, or folders that hold the seeds of one run.

    Raises:
        ValueError: If a folder has runs of several settings, or the runs several tasks or data, or no common score.
    """
    every = [_seeds(folder) for folder in folders]
    jobs = {job(result) for each in every for _, result in each.values()}
    if len(jobs) > 1:
        raise ValueError(f"runs of {' and '.join(' on '.join(one) for one in sorted(jobs))}; compare runs of one")
    scores = [result["scores"] for each in every for _, result in each.values()]
    common = [(kind, name) for kind, name in SCORES if all(name in score.get(kind, {}) for score in scores)]
    if not common:
        raise ValueError("these runs have no score in common; compare finished runs of one task")
    kind, name = common[0]
    values = [[result["scores"][kind][name] for _, result in each.values()] for each in every]
    lines = []
    for folder, found in zip(folders, values, strict=True):
        mean, half = interval(found)
        spread = "one seed" if len(found) == 1 else f"± {half:.2f}, 95 % interval of {len(found)} seeds"
        lines.append(f"{folder}: {name} ({kind}) {mean:.2f} ({spread})")
    for folder, found in zip(folders[1:], values[1:], strict=True):
        less, half = difference(found, values[0])
        verdict = "level" if abs(less) <= half else "different"
        sure = f"± {half:.2f}: {verdict}" if half == half else "; two seeds of each show whether this is chance"
        lines.append(f"{folder} less {folders[0]}: {less:.2f} {sure}")
    if name != "bleu":
        return lines
    for folder, each in zip(folders[1:], every[1:], strict=True):
        for seed in sorted(each.keys() & every[0].keys()):
            p = bootstrap(every[0][seed][0], each[seed][0])
            lines.append(f"{folder} and {folders[0]}, models of seed {seed}: p = {p:.3f} (paired bootstrap)")
    return lines


def bootstrap(first: Path, second: Path) -> float:
    """Return the p-value of the difference in BLEU of two models, by paired bootstrap (Koehn 2004).

    Raises:
        ValueError: If a run wrote no translations, or they are of other sentences.
    """
    from sacrebleu.significance import PairedTest

    from normkit_papers.data.corpora import CORPORA, locate
    from normkit_papers.train.scores import counted, metric

    data = results.read(first)["run"]["data"]
    corpus = CORPORA[data] if data in CORPORA else locate(data).corpus
    (one, reference), (two, other) = (
        [counted(_lines(folder / "outputs" / f"{kind}.txt"), corpus) for kind in ("beam", "reference")]
        for folder in (first, second)
    )
    if reference != other:
        raise ValueError(f"{first} and {second} translated other sentences; compare runs on the same test split")
    if one == two:  # sacrebleu would report p < 0.05 where no sample differs
        return 1.0
    systems: list[Any] = [("first", one), ("second", two)]
    test = PairedTest(systems, {"BLEU": metric(corpus)}, [reference], test_type="bs", n_samples=SAMPLES)
    found: Any = test()[1]["BLEU"]
    return found[1].p_value


def _lines(path: Path) -> list[str]:
    if not path.is_file():
        raise ValueError(f"{path} is missing; runs of task mt write it when they end")
    return path.read_text(encoding="utf8").removesuffix("\n").split("\n")


def _seeds(folder: Path) -> dict[int, tuple[Path, dict[str, Any]]]:
    """Return the runs of a folder by seed, all of the same settings."""
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    there = results.find([folder])
    _, different = split(result["run"] for result in there.values())
    if others := sorted(different.keys() - {"seed", "name", "device", "threads", "workers"}):
        raise ValueError(f"{folder} has runs that differ in {', '.join(truncate(others))}; name the folder of one")
    for path, result in there.items():
        if not result["scores"]:
            raise ValueError(f"{path} has no scores ({result['status']}); compare runs that are done")
        if (seed := result["run"].get("seed", 0)) in found:
            raise ValueError(f"{found[seed][0]} and {path} have the same seed, {seed}; name one of them")
        found[seed] = path, result
    return found
