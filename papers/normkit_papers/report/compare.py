"""Comparison of runs: means over seeds, and translations of the same sentences."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from normkit.text import truncate
from normkit_papers.data.corpora import CORPORA, Corpus, locate
from normkit_papers.report import results
from normkit_papers.report.seeds import difference, interval
from normkit_papers.report.settings import flat, job, split
from normkit_papers.tasks import TASKS
from normkit_papers.train.folder import MOVABLE
from normkit_papers.train.scores import counted, metric

SCORES = tuple(dict.fromkeys((task.decided_by, task.metrics[0].key) for task in TASKS.values()))
"""Kind and name of scores; runs are compared by the first one that all have."""
SEARCHES = {"beam": "beam search", "running": "running statistics"}
SINGLE = (
    "two models each, on these test sentences; this is no statement about their norms, for another seed gives another"
    " model:"
)


class Difference(NamedTuple):
    """BLEU of two systems, and the p-value of the difference."""

    first: float
    second: float
    p: float


def paired(
    first: Sequence[str], second: Sequence[str], references: Sequence[str], corpus: Corpus, samples: int = 1000
) -> Difference:
    """Compare two systems' translations by paired bootstrap (Koehn 2004) with sacrebleu.

    Args:
        first: Translations by one system.
        second: Translations by another.
        references: Correct translations.
        corpus: The corpus, whose papers decide how BLEU is counted.
        samples: Number of bootstrap samples.

    Raises:
        ValueError: if the three have different lengths.
    """
    if not len(first) == len(second) == len(references) > 0:
        raise ValueError(
            f"{len(first)} and {len(second)} translations for {len(references)} references; needs as many of each"
        )
    from sacrebleu.significance import PairedTest

    texts = [counted(lines, corpus) for lines in (first, second, references)]
    systems: list[tuple[str, Sequence[str]]] = [("first", texts[0]), ("second", texts[1])]
    test = PairedTest(systems, {"BLEU": metric(corpus)}, [texts[2]], test_type="bs", n_samples=samples)
    one, two = cast(list, test()[1]["BLEU"])
    # if no sample differs, sacrebleu counts none beyond the difference and reports p < 0.05
    return Difference(one.score, two.score, 1.0 if one.score == two.score else two.p_value)


def read_outputs(folder: str | Path, kind: str = "beam") -> list[str]:
    """Read the translations of the test split by a run.

    Args:
        folder: Folder of the run.
        kind: Kind of scores, such as "beam"; "reference" for the correct translations.

    Raises:
        ValueError: if the run wrote none.
    """
    path = Path(folder) / "outputs" / f"{kind}.txt"
    if not path.is_file():
        raise ValueError(f"{path} is missing; runs of task mt write it when they end")
    return path.read_text(encoding="utf8").removesuffix("\n").split("\n")


def compared(folders: Sequence[Path]) -> list[str]:
    """Compare runs with the first, a line each.

    First the mean of each with its confidence interval over seeds, and the differences of these means; then, for
    translations, the paired bootstrap of single models, which have the same seed.

    Args:
        folders: Folders of runs, or folders that hold the seeds of one run.

    Raises:
        ValueError: if a folder has runs of several settings, or the runs have several tasks or data, or no score in
            common.
    """
    seeds = [_seeds(Path(folder)) for folder in folders]
    for path, result in (run for each in seeds for run in each.values()):
        if not result["scores"]:
            raise ValueError(f"{path} {result['status']}, so it has no scores; compare runs that are done")
    every = [result["scores"] for each in seeds for _, result in each.values()]
    jobs = {(job(result)[0], Path(job(result)[1]).name) for each in seeds for _, result in each.values()}
    if len(jobs) > 1:
        found = " and ".join(sorted(" on ".join(one) for one in jobs))
        raise ValueError(f"runs of {found}; compare runs of one task and data")
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
        less = difference(_values(each, kind, name), _values(seeds[0], kind, name))
        lines.append(f"{folder} less {folders[0]}: {less}")
    models = []
    for folder, each in zip(folders[1:], seeds[1:], strict=True):
        for seed in sorted(each.keys() & seeds[0].keys()) if name == "bleu" else []:
            (one, result), (two, _) = seeds[0][seed], each[seed]
            references = read_outputs(one, "reference")
            if references != read_outputs(two, "reference"):
                raise ValueError(f"{one} and {two} translated other sentences; compare runs on the same test split")
            data = result["run"]["data"]
            corpus = CORPORA[data] if data in CORPORA else locate(data).corpus
            found = paired(read_outputs(one), read_outputs(two), references, corpus)
            scores = f"{found.second:.2f} against {found.first:.2f}, p = {found.p:.3f}"
            models.append(
                f"{folder} and {folders[0]}, seed {seed}: {scores} (paired bootstrap, {len(references):,} lines)"
            )
    return [*lines, *([SINGLE, *models] if models else [])]


def _values(seeds: dict[int, tuple[Path, dict[str, Any]]], kind: str, name: str) -> list[float]:
    return [result["scores"][kind][name] for _, result in seeds.values()]


def _seeds(folder: Path) -> dict[int, tuple[Path, dict[str, Any]]]:
    """Return the runs of a folder by seed.

    Raises:
        ValueError: If they differ in another setting that changes results, too.
    """
    there = results.find([folder])
    _, different = split([flat(result["run"]) for result in there.values()])
    if others := sorted(different.keys() - {"seed", *MOVABLE}):
        raise ValueError(
            f"{folder} has runs of several settings, which differ in {', '.join(truncate(others))}; name the folder of "
            "one, or of its seeds"
        )
    found: dict[int, tuple[Path, dict[str, Any]]] = {}
    for path, result in there.items():
        before, _ = found.setdefault(seed := result["run"].get("seed", 0), (path, result))
        if before != path:
            raise ValueError(f"{before} and {path} are runs of the same seed, {seed}; needs one of each seed")
    return found
