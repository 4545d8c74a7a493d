"""Your own sequence pairs in plain files: one sequence per line, symbols between spaces."""

import collections
import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normkit._util import unknown
from normkit_papers.data.corpora import SPLITS
from normkit_papers.data.embedded import SOURCES, Pairs
from normkit_papers.data.lines import read_pairs
from normkit_papers.data.vocab import EOS, SPECIAL, Vocab

SIDES = ("source", "target")


def reader(name: str) -> Callable[[], Any]:
    """Return the function that reads a data set: a row of SOURCES, or `folder` for a path.

    Raises:
        ValueError: If there is neither; the message names the nearest row.

    >>> reader("cmudict").__name__
    'cmudict'
    """
    if name in SOURCES:
        return SOURCES[name]
    if Path(name).is_dir():
        return functools.partial(folder, name)
    raise unknown(SOURCES, name, "data", ", or name a folder of text files")


def folder(path: str | Path) -> Pairs:
    """Read a folder with `train.source`, `train.target`, `valid.source` ... `test.target`.

    Line n of a target belongs to line n of its source. The vocabularies have the symbols of the training split. Test
    lines with the same source are one item with several references.

    Raises:
        ValueError: If a file is missing or not UTF-8, or a split is empty, misaligned or has an empty line or a
            reserved symbol, such as `<unk>`.
    """
    path = Path(path)
    missing = [f"{split}.{side}" for split in SPLITS for side in SIDES if not (path / f"{split}.{side}").is_file()]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; needs a source and a target of {', '.join(SPLITS)}")
    symbols = {
        split: [
            (source.split(), target.split())
            for source, target in read_pairs(path / f"{split}.source", path / f"{split}.target")
        ]
        for split in SPLITS
    }
    for split, at in itertools.product(SPLITS, range(len(SIDES))):
        if reserved := {*SPECIAL} & {symbol for pair in symbols[split] for symbol in pair[at]}:
            raise ValueError(f"{path / split}.{SIDES[at]} has the symbol {min(reserved)}, which is reserved; rename it")
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
    return Pairs(path.absolute().name, **splits, references=list(answers.values()), vocabularies=vocabularies)
