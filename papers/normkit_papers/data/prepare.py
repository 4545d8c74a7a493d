"""Corpora as numbers: learn vocabularies and encode the text once.

The arrays are cached and mapped into memory.

The cache (`NORMKIT_CACHE`, or `~/.cache/normkit`) has a folder for each content of the files and each set of settings.
Text is streamed in chunks and each finished chunk is noted, so that interrupted work continues, also after a full disk.
Damaged arrays are made again. Processes that need the same arrays wait for the first one. If the arrays are complete,
the cache may be read-only.
"""

import contextlib
import dataclasses
import errno
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from normkit._util import cache_folder, write_whole
from normkit_papers.data import OnStage
from normkit_papers.data.corpora import SPLITS, Corpus, Located
from normkit_papers.data.embedded import Text, split_of
from normkit_papers.data.lines import open_bytes, read_columns, read_lines, read_pairs
from normkit_papers.data.ragged import Ragged
from normkit_papers.data.subwords import Subwords, vocabulary
from normkit_papers.data.vocab import BOS, EOS, SPECIAL, UNK, Vocab

FORMAT = 3
CHUNK = 20_000  # lines encoded between two notes
REPORT = 1_000_000  # lines read between two reports of progress
UNKNOWN = 0.2  # largest fraction of unknown symbols in a split
Line = TypeVar("Line")


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


def prepare(located: Located, *, subwords: int = 0, share: bool = False, on_stage: OnStage = lambda stage: None) -> Any:
    """Encode a corpus, or map its arrays from the cache.

    Args:
        located: The corpus and its files.
        subwords: Size of each vocabulary; 0 uses the corpus' own.
        share: Learn one vocabulary of both sides.
        on_stage: Called with a description of each stage.

    Returns:
        A `Parallel`, or a `Text` for running text.

    Raises:
        ValueError: If a file is not the one in the table of corpora, is misaligned, not UTF-8 or has an empty side, or
            if more than a fifth of a split's symbols are unknown.
        OSError: If the disk is full.
    """
    corpus, size = located.corpus, subwords or located.corpus.subwords
    if share and corpus.kind == "text":
        raise ValueError("running text has one vocabulary; share=True is for parallel text")
    cache = cache_folder()
    try:
        digests = [_check(corpus, split, path, cache, on_stage) for split in SPLITS for path in located.files[split]]
        key = json.dumps([FORMAT, corpus.kind, corpus.columns, corpus.tokenized, size, share, digests])
        folder = cache / f"{corpus.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        vocabularies = _cached(corpus, share, folder)
        facts = {split: _noted(folder, split, vocabularies) for split in SPLITS} if vocabularies else {}
        if not facts or not all(done["whole"] for done in facts.values()):  # complete: the cache may be read-only
            folder.mkdir(parents=True, exist_ok=True)
            with _lock(folder, on_stage):
                vocabularies = _vocabularies(located, size, share, folder, on_stage)
                facts = {split: _encode(located, split, vocabularies, folder, on_stage) for split in SPLITS}
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC,
                f"no space left in {cache}; finished work is kept: free space or set NORMKIT_CACHE, then repeat",
            ) from None
        raise
    if corpus.kind == "text":
        maps = {split: np.memmap(_path(folder, split, "words"), np.int32, "c") for split in SPLITS}  # writes stay here
        streams = {split: torch.from_numpy(stream) for split, stream in maps.items()}
        words = sum(len(line.split()) + 1 for (line,) in _lines(located, "test")) if size else 0
        return Text(located.name, **streams, vocabularies=vocabularies, words=words)
    bitexts = {split: Bitext(*(_open(folder, split, side, vocabularies) for side in vocabularies)) for split in SPLITS}
    return Parallel(
        located.name, corpus, **bitexts, vocabularies=vocabularies, facts=facts, lines=lambda s: _lines(located, s)
    )


def _lines(located: Located, split: str) -> Iterator[tuple[str, ...]]:
    """Yield the lines of a split, as tuples of its sides."""
    files, corpus = located.files[split], located.corpus
    if corpus.kind == "text":
        return ((line,) for line in read_lines(files[0]))
    if files[0] != files[1]:
        return read_pairs(*files)
    pairs, splits = read_columns(files[0], *corpus.columns), set(located.files.values())
    return pairs if len(splits) > 1 else (pair for pair in pairs if split_of(pair[1]) == split)


def _report(lines: Iterable[Line], what: str, on_stage: OnStage) -> Iterator[Line]:
    """Yield the same lines, and report how many have been read."""
    for number, line in enumerate(lines):
        if number % REPORT == 0:
            on_stage(f"{what}, line {number:,}" if number else what)
        yield line


def _check(corpus: Corpus, split: str, path: Path, cache: Path, on_stage: OnStage) -> str:
    """Return the MD5 of a file; ValueError if it is not the file in the table of corpora."""
    stat = path.stat()
    mark = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:24]
    note = cache / "digests" / f"{mark}.json"
    seen = _read(note)
    if not isinstance(seen, dict) or not {"md5", "lines"} <= seen.keys():
        md5, lines = hashlib.md5(usedforsecurity=False), 0
        for _ in _report(read_lines(path), f"checking {path.name}", on_stage):  # checks each line
            lines += 1
        with open_bytes(path) as file:
            while block := file.read(1 << 20):
                md5.update(block)
        seen = {"md5": md5.hexdigest(), "lines": lines}
        _write(note, seen)
    names = [name for name in corpus.known if str(path).removesuffix(".xz").removesuffix(".gz").endswith(f"/{name}")]
    if names:
        expected = corpus.known[max(names, key=len)]
        if seen["lines"] != expected.lines:
            short = "; it was cut short" if seen["lines"] < expected.lines else ""
            raise ValueError(
                f"{path} has {seen['lines']:,} lines, {corpus.name} has {expected.lines:,}{short}. Get it from "
                f"{corpus.origin}. For your own text, name the files {split}.source and {split}.target"
            )
        if expected.md5 not in (None, seen["md5"]):
            raise ValueError(
                f"{path} is not that file of {corpus.name}: its MD5 is {seen['md5']}, not {expected.md5}. Get it "
                f"from {corpus.origin}"
            )
    return seen["md5"]


def _cached(corpus: Corpus, share: bool, folder: Path) -> dict[str, Vocab]:
    """Return the cached vocabularies; none if there are none, or the file is damaged."""
    plain = _read(folder / "vocab.json")
    try:
        made = {side: vocabulary(plain[side]) for side in _sides(corpus)}
    except (KeyError, TypeError, ValueError):
        return {}
    return dict.fromkeys(made, next(iter(made.values()))) if share else made


def _sides(corpus: Corpus) -> tuple[str, ...]:
    return ("words",) if corpus.kind == "text" else ("source", "target")


def _vocabularies(located: Located, size: int, share: bool, folder: Path, on_stage: OnStage) -> dict[str, Vocab]:
    corpus, sides = located.corpus, _sides(located.corpus)
    if cached := _cached(corpus, share, folder):
        return cached
    for split in SPLITS:
        (folder / f"{split}.json").unlink(missing_ok=True)  # encoded with another vocabulary
    plain, made = {}, {}
    for group in [sides] if share else [(side,) for side in sides]:
        pairs = _report(_lines(located, "train"), "learning subwords" if size else "counting words", on_stage)
        lines = (pair[sides.index(side)] for pair in pairs for side in group)
        learned = Subwords.learn(lines, size, punctuation=not corpus.tokenized) if size else _words(lines)
        plain |= {side: learned.plain() for side in group}
        made |= dict.fromkeys(group, learned)
    _write(folder / "vocab.json", plain)
    return made


def _words(lines: Iterator[str]) -> Vocab:
    """Make a vocabulary of the words of a text, the most frequent first."""
    counts = Counter(word for line in lines for word in line.split())
    words = sorted((word for word in counts if word not in SPECIAL), key=lambda word: (-counts[word], word))
    return Vocab(words)


def _encode(
    located: Located, split: str, vocabularies: dict[str, Vocab], folder: Path, on_stage: OnStage
) -> dict[str, Any]:
    """Complete the arrays of a split, and return its sizes."""
    note, sides = folder / f"{split}.json", list(vocabularies)
    done = _noted(folder, split, vocabularies)
    if done["whole"]:
        return done
    for path, size in _bytes(folder, split, vocabularies, done).items():
        path.touch()
        os.truncate(path, size)  # remove what was written after the last note
    lines = itertools.islice(_lines(located, split), done["lines"], None)
    while chunk := list(itertools.islice(lines, CHUNK)):
        on_stage(f"encoding {split}, line {done['lines']:,}")
        for side, texts in zip(sides, zip(*chunk, strict=True), strict=True):
            vocab = vocabularies[side]
            rows = (
                vocab.encode_texts(texts) if isinstance(vocab, Subwords) else [vocab.encode(t.split()) for t in texts]
            )
            begin = [BOS] if side == "words" and not done["lines"] else []  # running text is one sequence
            flat = np.array([*begin, *(number for row in rows for number in (*row, EOS))], _kind(side, vocabularies))
            _append(_path(folder, split, side), flat)
            _append(_path(folder, split, side, "sizes"), np.array([len(row) + 1 for row in rows], np.int32))
            done[side]["symbols"] += len(flat)
            done[side]["unknown"] += int((flat == UNK).sum())
        done["lines"] += len(chunk)
        _write(note, done)
    if not done["lines"]:
        raise ValueError(f"the {split} split of {located.name} is empty; needs at least one line")
    for side in sides:
        share = done[side]["unknown"] / done[side]["symbols"]
        if share > UNKNOWN:
            path = located.files[split][-1 if side == "target" else 0]
            raise ValueError(
                f"{100 * share:.0f} % of the symbols of {path} are unknown to the vocabulary of the training split; "
                "are both in one language, script and tokenization?"
            )
    done["whole"] = True
    _write(note, done)
    return done


def _noted(folder: Path, split: str, vocabularies: dict[str, Vocab]) -> dict[str, Any]:
    """Return the note on the arrays of a split, empty if their lengths differ from it."""
    nothing = {"lines": 0, "whole": False, **{side: {"symbols": 0, "unknown": 0} for side in vocabularies}}
    try:
        done = {**nothing, **_read(folder / f"{split}.json")}
        more = [path.stat().st_size - size for path, size in _bytes(folder, split, vocabularies, done).items()]
    except (OSError, TypeError, KeyError):
        return nothing
    return done if not any(more) or (min(more) >= 0 and not done["whole"]) else nothing


def _bytes(folder: Path, split: str, vocabularies: dict[str, Vocab], done: dict[str, Any]) -> dict[Path, int]:
    """Return the size of each array of a split in bytes, by its note."""
    sizes = {}
    for side in vocabularies:
        sizes[_path(folder, split, side)] = _kind(side, vocabularies).itemsize * done[side]["symbols"]
        sizes[_path(folder, split, side, "sizes")] = 4 * done["lines"]
    return sizes


def _open(folder: Path, split: str, side: str, vocabularies: dict[str, Vocab]) -> Ragged:
    flat = np.memmap(_path(folder, split, side), _kind(side, vocabularies), "r")
    sizes = np.fromfile(_path(folder, split, side, "sizes"), np.int32)
    return Ragged(flat, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))


def _path(folder: Path, split: str, side: str, what: str = "numbers") -> Path:
    return folder / f"{split}.{side}.{what}"


def _kind(side: str, vocabularies: dict[str, Vocab]) -> np.dtype:
    small = side != "words" and len(vocabularies[side]) <= np.iinfo(np.uint16).max
    return np.dtype(np.uint16 if small else np.int32)


def _append(path: Path, values: np.ndarray) -> None:
    with path.open("ab") as file:
        file.write(values.tobytes())
        file.flush()
        os.fsync(file.fileno())


def _read(path: Path) -> Any:
    """Read a note; None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, ensure_ascii=False).encode())


@contextlib.contextmanager
def _lock(folder: Path, on_stage: OnStage) -> Iterator[None]:
    """Lock the folder inside the block, after its present holder; no lock on some systems."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_stage("waiting for another process that prepares the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        yield
