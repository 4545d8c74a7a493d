"""Text corpora: those of `corpora.toml` by name, and folders of your own.

`locate` finds the files of a corpus; `normkit_papers.data.prepare` checks and encodes them.
"""

import dataclasses
import hashlib
import html
import re
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from normkit_papers.data.files import find, find_file, read_lines, read_pairs, table

SPLITS = ("train", "valid", "test")
QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")


class SplitFiles(NamedTuple):
    """Files of a split; `corpora.toml` explains the fields."""

    files: Sequence[str]
    lines: int = 0
    md5: str = ""
    remark: str = ""
    split_words: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A row of the table of texts; `corpora.toml` explains its keys."""

    name: str
    folders: Sequence[str] = ()
    sides: Sequence[str]
    splits: dict[str, SplitFiles]
    instead: dict[str, SplitFiles]
    columns: Sequence[int] = ()
    subwords: int = 8000
    tokenized: bool = True
    compounds: bool = False
    origin: str

    @property
    def kind(self) -> Literal["parallel", "text"]:
        """Parallel text in two languages, or running text."""
        return "text" if len(self.sides) == 1 else "parallel"


def _corpus(instead: Any = None, **row: Any) -> Corpus:
    splits = {split: SplitFiles(**row.pop(split)) for split in SPLITS}
    return Corpus(splits=splits, instead={split: SplitFiles(**part) for split, part in (instead or {}).items()}, **row)


CORPORA: dict[str, Corpus] = {name: _corpus(**row) for name, row in table("text").items()}
"""By name."""


class Located(NamedTuple):
    """A corpus whose files were found."""

    corpus: Corpus
    parts: dict[str, SplitFiles]
    """What is here of each split: its own files, or those that replace them."""
    files: dict[str, list[tuple[Path, ...]]]
    """Files of each split, one after another: source and target, or one file."""

    @property
    def partial(self) -> str:
        """What is missing or replaced; empty if nothing."""
        return ", ".join(part.remark for part in self.parts.values() if part.remark)

    @property
    def name(self) -> str:
        """The name, and what is missing."""
        return f"{self.corpus.name} ({self.partial})" if self.partial else self.corpus.name

    @property
    def split_words(self) -> bool:
        """True if some files are tokenized otherwise, so that all are made alike."""
        return any(part.split_words for part in self.parts.values())

    def lines(self, split: str) -> Iterator[tuple[str, ...]]:
        """Yield the lines of a split: source and target, or one."""
        corpus, shared = self.corpus, self.corpus.columns and self.files["train"] == self.files["test"]
        for paths in self.files[split]:
            if corpus.kind == "text":
                yield from ((line,) for line in read_lines(paths[0]))
                continue
            for pair in read_pairs(paths, corpus.columns):
                if not shared or split_of(pair[1]) == split:
                    yield tuple(map(words, pair)) if self.split_words else pair


def words(text: str) -> str:
    r"""Undo escapes and split off punctuation, so that texts of several tokenizations become alike.

    >>> words("it &apos;s well-known .") == words("it\u2019s well-known.")
    True
    """
    return " ".join(re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFC", html.unescape(text)).translate(QUOTES)))


def split_of(name: str) -> str:
    """Assign a name to train, valid or test by its SHA-256: 90, 5 and 5 percent.

    >>> split_of("transformer")
    'train'
    """
    share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    return "train" if share < 90 else "valid" if share < 95 else "test"


def locate(name: str) -> Located:
    """Find the files of a corpus.

    Args:
        name: A row of CORPORA; or a folder of your own, with `train.source`, `train.target`, `valid.source` ...; with
            `train.tsv` ..., a tab between source and target; or, of running text, with `train.txt` ....

    Raises:
        ValueError: If the name is unknown or files are missing; the message names them and their source.
    """
    corpus, folder = find(name, CORPORA, "corpus", lambda corpus, folder: _in_folder(corpus, folder)[1])
    if corpus is not None:
        return _in_folder(corpus, folder)[0]
    own: dict[str, Any] = {"name": folder.name, "tokenized": False, "origin": "its owner"}
    lacking = []
    for pattern, form in (
        ("{}.{{}}", {"sides": ("source", "target")}),
        ("{}.tsv", {"sides": ("source", "target"), "columns": (0, 1)}),
        ("{}.txt", {"sides": ("words",), "subwords": 0}),
    ):
        splits = {split: {"files": [pattern.format(split)]} for split in SPLITS}
        located, missing = _in_folder(_corpus(**own, **form, **splits), folder)
        if not missing:
            return located
        lacking.append(", ".join(missing))
    raise ValueError(f"{folder} has no text: it lacks {'; or '.join(lacking)}")


def _in_folder(corpus: Corpus, folder: Path) -> tuple[Located, list[str]]:
    """Return the corpus in a folder, and the files that are missing there (plain, .xz or .gz)."""
    located, missing = Located(corpus, {}, {}), list[str]()
    for split, own in corpus.splits.items():
        lacking = list[str]()
        for part in filter(None, (own, corpus.instead.get(split))):
            names = [list(dict.fromkeys(file.format(side) for side in corpus.sides)) for file in part.files]
            paths = {name: find_file(folder / name) for file in names for name in file}
            if None not in paths.values():
                located.parts[split] = part
                located.files[split] = [tuple(path for name in file if (path := paths[name])) for file in names]
                break
            lacking = lacking or [name for name, path in paths.items() if path is None]
        else:
            missing += lacking
    return located, list(dict.fromkeys(missing))
