"""Corpora as numbers: check the files, learn vocabularies and encode the text once.

The arrays lie in the cache (`NORMKIT_CACHE`, or `~/.cache/normkit`), in a folder for each content of the files and each
set of settings, and are mapped into memory. Processes that need the same arrays wait for the first one.
"""

import dataclasses
import hashlib
import itertools
import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from normkit._util import cache_folder
from normkit_papers.data import OnStage
from normkit_papers.data.corpora import SPLITS, Corpus, Located
from normkit_papers.data.embedded import Text
from normkit_papers.data.lines import open_bytes, read_lines
from normkit_papers.data.ragged import Ragged
from normkit_papers.data.subwords import Subwords, vocabulary
from normkit_papers.data.vocab import BOS, EOS, SPECIAL, UNK, Vocab

FORMAT = 4
CHUNK = 20_000  # lines encoded together
UNKNOWN = 0.2  # largest fraction of unknown symbols in a split


class Bitext(NamedTuple):
    """Both sides of a split as numbers, including the ends."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A parallel corpus as numbers; `lines(split)` reads its text, `facts` has its sizes."""

    name: str
    corpus: Corpus
    train: Bitext
    valid: Bitext
    test: Bitext
    vocabularies: dict[str, Vocab]
    lines: Callable[[str], Iterator[tuple[str, ...]]]
    facts: dict[str, Any]


def prepare(
    located: Located, *, subwords: int = 0, share: bool = False, on_stage: OnStage = lambda stage: None
) -> Parallel | Text:
    """Encode a corpus, or map its arrays from the cache.

    Args:
        located: The corpus and its files.
        subwords: Size of each vocabulary; 0 uses the corpus' own.
        share: Learn one vocabulary of both sides.
        on_stage: Called with a description of each stage.

    Returns:
        A `Parallel`, or a `Text` for running text.

    Raises:
        ValueError: If a file is not the one in the table of corpora, is misaligned, not UTF-8 or has a blank side, or
            if more than a fifth of a split's symbols are unknown.
        OSError: If the disk is full.
    """
    corpus, size = located.corpus, subwords or located.corpus.subwords
    if share and corpus.kind == "text":
        raise ValueError("share=True needs parallel text; running text has one vocabulary")
    files = dict.fromkeys(path for split in SPLITS for part in located.files[split] for path in part)
    digests = [_digest(path) for path in files]
    key = [FORMAT, corpus.kind, corpus.columns, corpus.split_words, corpus.tokenized, size, share, digests]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    folder = cache_folder() / f"{corpus.name}-{name}"
    kept = _load(folder)
    if kept is None:
        from filelock import FileLock

        folder.parent.mkdir(parents=True, exist_ok=True)
        on_stage(f"preparing {located.name}")
        with FileLock(f"{folder}.lock"):
            if (kept := _load(folder)) is None:  # no other process was faster
                _encode(located, size, share, folder, on_stage)
                kept = _load(folder)
    assert kept is not None
    note, arrays = kept
    vocabularies = {side: vocabulary(plain) for side, plain in note["vocabularies"].items()}
    if corpus.kind == "text":
        streams = {split: torch.from_numpy(arrays[f"{split}.words"]) for split in SPLITS}
        return Text(located.name, **streams, vocabularies=vocabularies, words=note["words"] if size else 0)
    if share:
        vocabularies["target"] = vocabularies["source"]
    bitexts = {
        split: Bitext(*(Ragged(arrays[f"{split}.{side}"], arrays[f"{split}.{side}.offsets"]) for side in vocabularies))
        for split in SPLITS
    }
    return Parallel(
        located.name, corpus, **bitexts, vocabularies=vocabularies, lines=located.lines, facts=note["facts"]
    )


def _load(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]] | None:
    """Return the note and the arrays of a corpus; None if one is missing or cut short."""
    try:
        note = json.loads((folder / "note.json").read_text(encoding="utf8"))
        return note, {name: np.load(folder / f"{name}.npy", mmap_mode="c") for name in note["arrays"]}
    except (OSError, ValueError, KeyError):
        return None


def _encode(located: Located, size: int, share: bool, folder: Path, on_stage: OnStage) -> None:
    """Write the folder of a corpus."""
    for path, known in located.known.items():
        on_stage(f"checking {path.name}")
        _check(located, path, **known)
    vocabularies = _learn(located, size, share, on_stage)
    arrays: dict[str, np.ndarray] = {}
    facts = {}
    for split in SPLITS:
        on_stage(f"encoding {split}")
        made, facts[split] = _encode_split(located, split, vocabularies)
        arrays |= {f"{split}.{name}": array for name, array in made.items()}
    words = sum(len(line.split()) + 1 for (line,) in located.lines("test")) if len(vocabularies) == 1 else 0
    plain = {side: vocab.plain() for side, vocab in vocabularies.items()}
    note = {"arrays": list(arrays), "vocabularies": plain, "facts": facts, "words": words}
    beside = folder.with_name(f".{folder.name}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    for name, array in arrays.items():
        np.save(beside / f"{name}.npy", array)
    (beside / "note.json").write_text(json.dumps(note, ensure_ascii=False), encoding="utf8")
    shutil.rmtree(folder, ignore_errors=True)  # damaged
    beside.rename(folder)


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


def _learn(located: Located, size: int, share: bool, on_stage: OnStage) -> dict[str, Vocab]:
    """Make the vocabulary of each side from the training split."""
    on_stage("learning subwords" if size else "counting words")
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check(located: Located, path: Path, lines: int, md5: str = "") -> None:
    """Raise a ValueError if a file has other lines or another MD5 than the table of corpora."""
    if (found := sum(1 for _ in read_lines(path))) != lines:
        raise ValueError(f"{path} has {found:,} lines, {located.corpus.name} has {lines:,}; get it again")
    with open_bytes(path) as file:
        if md5 and (other := hashlib.file_digest(file, "md5").hexdigest()) != md5:  # pyright: ignore[reportArgumentType]
            raise ValueError(f"{path} is not that file of {located.corpus.name}: its MD5 is {other}, not {md5}")
