"""Comparison of runs: their table and conclusions, and for translations of the same sentences p-values."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normkit_papers import results
from normkit_papers.report import summary
from normkit_papers.report.settings import labels

SAMPLES = 1000  # of the bootstrap


def compare(folders: Sequence[Path]) -> list[str]:
    """Compare runs: means over seeds, their differences, and p-values of translations by models of one seed.

    Args:
        folders: Folders of runs, or folders that hold runs.

    Raises:
        ValueError: If a folder has no runs.
    """
    found = results.find(folders)
    lines, names = [summary.text(found)], labels(found)
    first: dict[tuple[str, int], tuple[str, Path]] = {}  # data and seed -> label and folder of the first run
    for folder, result in found.items():
        if (folder / "outputs" / "beam.txt").is_file():
            seed, label = result["run"].get("seed", 0), names[folder]
            other, path = first.setdefault((result["run"]["data"], seed), (label, folder))
            if other != label:
                p = bootstrap(path, folder)
                lines.append(f"{label} and {other}, models of seed {seed}: p = {p:.3f} (paired bootstrap)")
    return lines


def bootstrap(first: Path, second: Path) -> float:
    """Return the p-value of the difference in BLEU of two models, by paired bootstrap (Koehn 2004).

    Raises:
        ValueError: If the translations are of other sentences.
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
    return path.read_text(encoding="utf8").removesuffix("\n").split("\n")
