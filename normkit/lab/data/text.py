"""Your own sequence pairs in plain files: one sequence per line, symbols between spaces."""

import collections
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from normkit.lab.data.embedded import SOURCES, Pairs
from normkit.lab.data.vocab import EOS, Vocab
from normkit.names import unknown

SPLITS, SIDES = ("train", "valid", "test"), ("source", "target")


def reader(name: str) -> Callable[[], Any]:
    """Return the function that reads a data set: a row of SOURCES, or `folder` for a path.

    Raises:
        ValueError: If there is neither; the message names the nearest row.

    >>> reader("cmudict").__name__
    'cmudict'

    ValueError, with the nearest name, where there is neither.
    """
    if name in SOURCES:
        return SOURCES[name]
    if Path(name).is_dir():
        return functools.partial(folder, name)
    raise unknown(SOURCES, name, "data", ", or name a folder of text files")


def folder(path: str | Path) -> Pairs:
    """Read `train.source`, `train.target`, `valid.source` ...

    `test.target` in a folder, UTF-8.

    Line n of a target belongs to line n of its source. The vocabularies have the symbols of the training split. Test
    lines with the same source are one item with several references.

    Raises:
        ValueError: If a file is missing or not UTF-8, or a split is empty, misaligned or has an empty line.
    """
    path = Path(path)
    missing = [f"{split}.{side}" for split in SPLITS for side in SIDES if not (path / f"{split}.{side}").is_file()]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; needs a source and a target of {', '.join(SPLITS)}")
    lines = {
        split: parallel(*(_lines(path / f"{split}.{side}") for side in SIDES), name=f"{path / split}.*")
        for split in SPLITS
    }
    symbols = {split: [(source.split(), target.split()) for source, target in lines[split]] for split in SPLITS}
    vocabularies = {
        side: Vocab(sorted({symbol for pair in symbols["train"] for symbol in pair[at]}))
        for at, side in enumerate(SIDES)
    }
    answers: dict[tuple[str, ...], list[list[str]]] = collections.defaultdict(list)
    for source, target in symbols["test"]:
        answers[tuple(source)].append(target)
    symbols["test"] = [(list(source), targets[0]) for source, targets in answers.items()]
    splits = {
        split: [
            ([*vocabularies["source"].encode(source), EOS], [*vocabularies["target"].encode(target), EOS])
            for source, target in symbols[split]
        ]
        for split in SPLITS
    }
    return Pairs(path.name, **splits, references=list(answers.values()), vocabularies=vocabularies)


def parallel(source: Sequence[str], target: Sequence[str], name: str = "the corpus") -> list[tuple[str, str]]:
    """Pair the lines of two files.

    Raises:
        ValueError: If there are none, unequal numbers of them, or empty ones.

    >>> parallel(["ein Satz"], ["a sentence"])
    [('ein Satz', 'a sentence')]
    """
    if len(source) != len(target):
        raise ValueError(f"{name} is misaligned: {len(source)} source lines, {len(target)} target lines; needs as many")
    if not source:
        raise ValueError(f"{name} is empty; needs at least one pair of lines")
    empty = [number for number, pair in enumerate(zip(source, target, strict=True), 1) if not all(map(str.strip, pair))]
    if empty:
        raise ValueError(
            f"{name} has an empty side in {len(empty)} lines, the first of them line {empty[0]}; drop them"
        )
    return list(zip(source, target, strict=True))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf8").removesuffix("\n").split("\n") if path.stat().st_size else []
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None
