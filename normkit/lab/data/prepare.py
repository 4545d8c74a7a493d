"""Corpora as numbers: vocabularies are learned, the text encoded, once; the arrays are kept and mapped into memory.

They lie in a cache (`NORMKIT_CACHE`, else `~/.cache/normkit`) under a name made of what the files contain and of the
settings. The text is read as a stream, in pieces, and each finished piece is noted: work that was interrupted, by a
full disk too, goes on where it was. What is damaged is made anew. Processes that want the same arrays wait for the
first of them; where nothing is left to do the cache is read alone.
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
from torch import Tensor

from normkit.files import cache_folder, write_whole
from normkit.lab.data.corpora import SPLITS, Corpus, Located
from normkit.lab.data.embedded import Text, split_of
from normkit.lab.data.lines import open_bytes, read_columns, read_lines, read_pairs
from normkit.lab.data.ragged import Ragged
from normkit.lab.data.subwords import Subwords, vocabulary
from normkit.lab.data.vocab import BOS, EOS, SPECIAL, UNK, Vocab

FORMAT = 2
PIECE = 20_000  # lines encoded between two notes of how far the work is
FAR = 1_000_000  # lines read between two words of how far it is
UNKNOWN = 0.2  # largest share of unknown symbols in a split
Tell = Callable[[str], object]
Line = TypeVar("Line")


class Bitext(NamedTuple):
    """Both sides of a split, as numbers, ends included."""

    source: Ragged
    target: Ragged

    def __len__(self) -> int:
        return len(self.source)


@dataclasses.dataclass(frozen=True)
class Parallel:
    """A parallel corpus as numbers. `lines` reads the text of a split again; `facts` says what is in it."""

    name: str
    corpus: Corpus
    train: Bitext
    valid: Bitext
    test: Bitext
    vocabularies: dict[str, Vocab]
    lines: Callable[[str], Iterator[tuple[str, ...]]]
    facts: dict[str, Any]


def prepare(located: Located, *, subwords: int = 0, share: bool = False, tell: Tell = lambda said: None) -> Any:
    """The corpus as numbers: `Parallel`, or `Text` where it is running text.

    `subwords` is the size of each vocabulary (0: the corpus' own choice), `share` makes one of both sides. `tell` hears
    how far the work is. ValueError where a file is not what the table of corpora says, is misaligned, is not UTF-8,
    has an empty side, or where more than a fifth of a split's symbols are unknown; OSError where the disk is full.
    """
    corpus, size = located.corpus, subwords or located.corpus.subwords
    if share and corpus.kind == "text":
        raise ValueError("running text has one vocabulary; share=True is for parallel text")
    cache = cache_folder()
    try:
        digests = [_check(corpus, split, path, cache, tell) for split in SPLITS for path in located.files[split]]
        key = json.dumps([FORMAT, corpus.kind, corpus.columns, corpus.tokenized, size, share, digests])
        folder = cache / f"{corpus.name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        vocabularies = _kept(corpus, share, folder)
        facts = {split: _noted(folder, split, vocabularies) for split in SPLITS} if vocabularies else {}
        if not facts or not all(done["whole"] for done in facts.values()):  # else a cache may be there to read alone
            folder.mkdir(parents=True, exist_ok=True)
            with _alone(folder, tell):
                vocabularies = _vocabularies(located, size, share, folder, tell)
                facts = {split: _encode(located, split, vocabularies, folder, tell) for split in SPLITS}
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OSError(
                errno.ENOSPC,
                f"no space left in {cache}; what is done is kept: make room, or set NORMKIT_CACHE, and go on",
            ) from None
        raise
    if corpus.kind == "text":
        streams = {split: _stream(_path(folder, split, "words")) for split in SPLITS}
        words = sum(len(line.split()) + 1 for (line,) in _lines(located, "test")) if size else 0
        return Text(located.name, **streams, vocabularies=vocabularies, words=words)
    bitexts = {split: Bitext(*(_open(folder, split, side, vocabularies) for side in vocabularies)) for split in SPLITS}
    return Parallel(
        located.name, corpus, **bitexts, vocabularies=vocabularies, facts=facts, lines=lambda s: _lines(located, s)
    )


def _lines(located: Located, split: str) -> Iterator[tuple[str, ...]]:
    """The lines of a split, a tuple of its sides each."""
    files, corpus = located.files[split], located.corpus
    if corpus.kind == "text":
        return ((line,) for line in read_lines(files[0]))
    if files[0] != files[1]:
        return read_pairs(*files)
    pairs, splits = read_columns(files[0], *corpus.columns), set(located.files.values())
    return pairs if len(splits) > 1 else (pair for pair in pairs if split_of(pair[1]) == split)


def _followed(lines: Iterable[Line], what: str, tell: Tell) -> Iterator[Line]:
    """The same lines; `tell` hears how far they have been read."""
    for number, line in enumerate(lines):
        if number % FAR == 0:
            tell(f"{what}, line {number:,}" if number else what)
        yield line


def _check(corpus: Corpus, split: str, path: Path, cache: Path, tell: Tell) -> str:
    """The digest of a file's content; ValueError where it is not what the table says."""
    stat = path.stat()
    mark = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:24]
    note = cache / "digests" / f"{mark}.json"
    seen = _read(note)
    if not isinstance(seen, dict) or not {"md5", "lines"} <= seen.keys():
        md5, lines = hashlib.md5(usedforsecurity=False), 0
        for _ in _followed(read_lines(path), f"checking {path.name}", tell):  # says what is wrong, and where
            lines += 1
        with open_bytes(path) as file:
            while block := file.read(1 << 20):
                md5.update(block)
        seen = {"md5": md5.hexdigest(), "lines": lines}
        _write(note, seen)
    names = [name for name in corpus.known if str(path).removesuffix(".xz").removesuffix(".gz").endswith(f"/{name}")]
    if names:
        wanted = corpus.known[max(names, key=len)]
        if seen["lines"] != wanted.lines:
            short = "; it was cut short" if seen["lines"] < wanted.lines else ""
            raise ValueError(
                f"{path} has {seen['lines']:,} lines, {corpus.name} has {wanted.lines:,}{short}. One gets it from "
                f"{corpus.origin}. Text of one's own goes into a folder, as {split}.source and {split}.target"
            )
        if wanted.md5 not in (None, seen["md5"]):
            raise ValueError(
                f"{path} is not that file of {corpus.name}: its MD5 is {seen['md5']}, not {wanted.md5}. One gets it "
                f"from {corpus.origin}"
            )
    return seen["md5"]


def _kept(corpus: Corpus, share: bool, folder: Path) -> dict[str, Vocab]:
    """The vocabularies that were learned before; none where they were not, or their file is damaged."""
    plain = _read(folder / "vocab.json")
    try:
        made = {side: vocabulary(plain[side]) for side in _sides(corpus)}
    except (KeyError, TypeError, ValueError):
        return {}
    return dict.fromkeys(made, next(iter(made.values()))) if share else made


def _sides(corpus: Corpus) -> tuple[str, ...]:
    return ("words",) if corpus.kind == "text" else ("source", "target")


def _vocabularies(located: Located, size: int, share: bool, folder: Path, tell: Tell) -> dict[str, Vocab]:
    corpus, sides = located.corpus, _sides(located.corpus)
    if kept := _kept(corpus, share, folder):
        return kept
    for split in SPLITS:
        (folder / f"{split}.json").unlink(missing_ok=True)  # what was encoded was so by other numbers
    plain, made = {}, {}
    for group in [sides] if share else [(side,) for side in sides]:
        pairs = _followed(_lines(located, "train"), "learning subwords" if size else "counting words", tell)
        lines = (pair[sides.index(side)] for pair in pairs for side in group)
        learned = Subwords.learn(lines, size, punctuation=not corpus.tokenized) if size else _words(lines)
        plain |= {side: learned.plain() for side in group}
        made |= dict.fromkeys(group, learned)
    _write(folder / "vocab.json", plain)
    return made


def _words(lines: Iterator[str]) -> Vocab:
    """The words of the text, the most frequent first."""
    counts = Counter(word for line in lines for word in line.split())
    words = sorted((word for word in counts if word not in SPECIAL), key=lambda word: (-counts[word], word))
    return Vocab(words)


def _encode(located: Located, split: str, vocabularies: dict[str, Vocab], folder: Path, tell: Tell) -> dict[str, Any]:
    """Write the arrays of a split, from where they are, and say what is in them."""
    note, sides = folder / f"{split}.json", list(vocabularies)
    done = _noted(folder, split, vocabularies)
    if done["whole"]:
        return done
    for path, size in _bytes(folder, split, vocabularies, done).items():
        path.touch()
        os.truncate(path, size)  # what was written after the last note
    lines = itertools.islice(_lines(located, split), done["lines"], None)
    while piece := list(itertools.islice(lines, PIECE)):
        tell(f"encoding {split}, line {done['lines']:,}")
        for side, texts in zip(sides, zip(*piece, strict=True), strict=True):
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
        done["lines"] += len(piece)
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
    """What is noted of the arrays of a split; that nothing is done, where they are not as long as noted."""
    nothing = {"lines": 0, "whole": False, **{side: {"symbols": 0, "unknown": 0} for side in vocabularies}}
    try:
        done = {**nothing, **_read(folder / f"{split}.json")}
        more = [path.stat().st_size - size for path, size in _bytes(folder, split, vocabularies, done).items()]
    except (OSError, TypeError, KeyError):
        return nothing
    return done if not any(more) or (min(more) >= 0 and not done["whole"]) else nothing


def _bytes(folder: Path, split: str, vocabularies: dict[str, Vocab], done: dict[str, Any]) -> dict[Path, int]:
    """How long the arrays of a split are by a note."""
    sizes = {}
    for side in vocabularies:
        sizes[_path(folder, split, side)] = _kind(side, vocabularies).itemsize * done[side]["symbols"]
        sizes[_path(folder, split, side, "sizes")] = 4 * done["lines"]
    return sizes


def _open(folder: Path, split: str, side: str, vocabularies: dict[str, Vocab]) -> Ragged:
    flat = np.memmap(_path(folder, split, side), _kind(side, vocabularies), "r")
    sizes = np.fromfile(_path(folder, split, side, "sizes"), np.int32)
    return Ragged(flat, np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]))


def _stream(path: Path) -> Tensor:
    """Running text as one tensor, mapped from its file; what is written to it stays in memory."""
    return torch.from_numpy(np.memmap(path, np.int32, "c"))


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
    """What a note says; None where there is none, or only a part of one."""
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except (FileNotFoundError, ValueError):
        return None


def _write(path: Path, content: Any) -> None:
    write_whole(path, json.dumps(content, ensure_ascii=False).encode())


@contextlib.contextmanager
def _alone(folder: Path, tell: Tell) -> Iterator[None]:
    """Nobody else works in the folder at the same time, where the system can say so."""
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            tell("waiting for another process that prepares the same data")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
