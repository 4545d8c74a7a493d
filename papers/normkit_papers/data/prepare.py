"""Corpora as numbers: check the files, learn vocabularies and encode the text once.

The arrays lie in the cache (`NORMKIT_CACHE`, or `~/.cache/normkit`), in a file for each content of the text and each
set of settings, and are mapped into memory. Processes that need the same file wait for the first one.
"""

import dataclasses
import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from torch import Tensor

from normkit._util import cache_folder, write_whole
from normkit_papers.data import Data, OnStage
from normkit_papers.data.batches import Ragged
from normkit_papers.data.corpora import SPLITS, Corpus, Located
from normkit_papers.data.embedded import Text
from normkit_papers.data.files import open_bytes
from normkit_papers.data.pairs import PairTable
from normkit_papers.data.vocab import BOS, EOS, SPECIAL, UNK, Subwords, Vocab, vocabulary

FORMAT = 5
CHUNK = 20_000  # lines encoded together
UNKNOWN = 0.2  # largest fraction of unknown symbols in a split


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel(Data):
    """A parallel corpus, a `PairTable` per split; `lines(split)` reads its text, `facts` has sizes."""

    corpus: Corpus
    lines: Callable[[str], Iterator[tuple[str, ...]]]
    facts: dict[str, Any]


def prepare(
    located: Located, *, subwords: int = 0, share: bool = False, on_stage: OnStage = lambda stage: None
) -> Parallel | Text:
    """Encode a corpus, or map its arrays from the cache: a `Parallel`, or a `Text` for running text.

    `subwords` is the size of each vocabulary, 0 for the corpus' own; with `share` both sides have one.

    Raises:
        ValueError: If a file is not the one in the table of corpora, is misaligned, not UTF-8 or has a blank side, or
            if more than a fifth of a split's symbols are unknown.
        OSError: If the disk is full.
    """
    corpus, size = located.corpus, subwords or located.corpus.subwords
    if share and corpus.kind == "text":
        raise ValueError("share=True needs parallel text; running text has one vocabulary")
    files = dict.fromkeys(path for split in SPLITS for part in located.files[split] for path in part)
    digests = [_digest([path], "sha256", plain=True) for path in files]
    key = [FORMAT, corpus.kind, list(corpus.columns), located.split_words, corpus.tokenized, size, share, digests]
    cached = cache_folder() / f"{corpus.name}-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.safetensors"
    if (kept := _load(cached)) is None:
        from filelock import FileLock

        cached.parent.mkdir(parents=True, exist_ok=True)
        on_stage(f"preparing {located.name}")
        with FileLock(f"{cached}.lock"):
            if (kept := _load(cached)) is None:  # no other process was faster
                note, made = _encode(located, size, share, on_stage)
                write_whole(cached, safetensors.numpy.save(made, {"note": json.dumps(note)}))
                kept = _load(cached)
    assert kept is not None
    note, arrays = kept
    vocabularies = {side: vocabulary(plain) for side, plain in note["vocabularies"].items()}
    if corpus.kind == "text":
        streams = {split: arrays[f"{split}.words"] for split in SPLITS}
        return Text(name=located.name, **streams, vocabularies=vocabularies, words=note["words"] if size else 0)
    if share:
        vocabularies["target"] = vocabularies["source"]
    flat = {name: array.numpy() for name, array in arrays.items()}

    def read(side: str) -> Ragged:
        return Ragged(flat[side], flat[f"{side}.offsets"])

    tables = {split: PairTable(read(f"{split}.source"), read(f"{split}.target")) for split in SPLITS}
    return Parallel(
        name=located.name, corpus=corpus, **tables, vocabularies=vocabularies, lines=located.lines, facts=note["facts"]
    )


def _load(cached: Path) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Return the note and the arrays of a corpus; None if the file is missing or cut short."""
    try:
        with safetensors.safe_open(cached, "pt") as file:
            return json.loads(file.metadata()["note"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError):
        return None


def _encode(
    located: Located, size: int, share: bool, on_stage: OnStage
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return vocabularies and sizes of a corpus, and its arrays."""
    for split in SPLITS:
        on_stage(f"checking {split}")
        check(located, split)
    on_stage("learning subwords" if size else "counting words")
    vocabularies = _learn(located, size, share)
    arrays: dict[str, np.ndarray] = {}
    facts = {}
    for split in SPLITS:
        on_stage(f"encoding {split}")
        made, facts[split] = _encode_split(located, split, vocabularies)
        arrays |= {f"{split}.{name}": array for name, array in made.items()}
    words = sum(len(line.split()) + 1 for (line,) in located.lines("test")) if len(vocabularies) == 1 else 0
    plain = {side: vocab.plain() for side, vocab in vocabularies.items()}
    return {"vocabularies": plain, "facts": facts, "words": words}, arrays


def check(located: Located, split: str) -> None:
    """Raise a ValueError if a split has other lines or another MD5 than the table of corpora."""
    part = located.parts[split]
    files = f"the files {', '.join(part.files)} of {located.corpus.name}"
    if part.lines and (lines := sum(1 for _ in located.lines(split))) != part.lines:
        raise ValueError(f"{files} have {lines:,} lines instead of {part.lines:,}; get them again")
    paths = dict.fromkeys(path for paths in located.files[split] for path in paths)
    if part.md5 and (md5 := _digest(paths, "md5")) != part.md5:
        raise ValueError(f"{files} have another content than expected: their MD5 is {md5} instead of {part.md5}")


def _encode_split(
    located: Located, split: str, vocabularies: dict[str, Vocab]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return the arrays and the sizes of a split."""
    rows: dict[str, list[np.ndarray]] = {side: [] for side in vocabularies}
    sizes: dict[str, list[int]] = {side: [] for side in vocabularies}
    lines = located.lines(split)
    while chunk := list(itertools.islice(lines, CHUNK)):
        for (side, vocab), texts in zip(vocabularies.items(), zip(*chunk, strict=True), strict=True):
            kind = np.uint16 if side != "words" and len(vocab) <= 2**16 else np.int32
            found = [[*row, EOS] for row in vocab.encode_texts(texts)]
            rows[side].append(np.fromiter(itertools.chain.from_iterable(found), kind))
            sizes[side] += map(len, found)
    arrays: dict[str, np.ndarray] = {}
    facts: dict[str, Any] = {"lines": len(next(iter(sizes.values())))}
    if not facts["lines"]:
        raise ValueError(f"the {split} split of {located.name} is empty; needs at least one line")
    for side in vocabularies:
        flat = np.concatenate(rows[side])
        facts[side] = {"symbols": len(flat), "unknown": int((flat == UNK).sum())}
        if facts[side]["unknown"] > UNKNOWN * len(flat):
            share = 100 * facts[side]["unknown"] / len(flat)
            raise ValueError(
                f"{share:.0f} % of the {side} symbols of {located.files[split][0][-1 if side == 'target' else 0]} are "
                "unknown to the vocabulary of the training split; are both in one language, script and tokenization?"
            )
        if side == "words":  # running text is one sequence
            arrays[side] = np.concatenate([np.array([BOS], flat.dtype), flat])
        else:
            arrays[side], arrays[f"{side}.offsets"] = flat, np.cumsum([0, *sizes[side]])
    return arrays, facts


def _learn(located: Located, size: int, share: bool) -> dict[str, Vocab]:
    """Make the vocabulary of each side from the training split."""
    sides = ("words",) if located.corpus.kind == "text" else ("source", "target")
    made: dict[str, Vocab] = {}
    for group in [sides] if share else [(side,) for side in sides]:
        lines = (pair[sides.index(side)] for pair in located.lines("train") for side in group)
        learned = Subwords.learn(lines, size, punctuation=not located.corpus.tokenized) if size else _words(lines)
        made |= dict.fromkeys(group, learned)
    return made


def _words(lines: Iterator[str]) -> Vocab:
    """Make a vocabulary of the words of a text, the most frequent first."""
    counts = Counter(word for line in lines for word in line.split())
    return Vocab(sorted((word for word in counts if word not in SPECIAL), key=lambda word: (-counts[word], word)))


def _digest(paths: Iterable[Path], kind: str, plain: bool = False) -> str:
    """Return a digest of files one after another, decompressed unless `plain`."""
    digest = hashlib.new(kind, usedforsecurity=False)
    for path in paths:
        with path.open("rb") if plain else open_bytes(path) as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest()
