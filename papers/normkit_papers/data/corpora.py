"""Text corpora: those of `corpora.toml` by name, and folders of your own.

`NORMKIT_DATA` lists folders (separated by colons, on Windows semicolons) that contain a folder for each data set.
`locate` finds the files of a corpus; `normkit_papers.data.prepare` checks and encodes them.
"""

import dataclasses
import functools
import html
import importlib.resources
import os
import re
import tomllib
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from normkit._util import unknown
from normkit_papers.data.embedded import split_of
from normkit_papers.data.lines import find_file, read_columns, read_lines, read_pairs

VARIABLE = "NORMKIT_DATA"
SPLITS = ("train", "valid", "test")
QUOTES = str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")


@functools.cache
def table(kind: Literal["text", "images", "detection"]) -> dict[str, dict[str, Any]]:
    """Return the rows of a kind of data in `corpora.toml`, by name."""
    text = importlib.resources.files("normkit_papers.data").joinpath("corpora.toml").read_text(encoding="utf8")
    return tomllib.loads(text)[kind]


def data_roots() -> list[Path]:
    """Return the folders that `NORMKIT_DATA` lists."""
    return [Path(root) for root in os.environ.get(VARIABLE, "").split(os.pathsep) if root]


def not_here(name: str, folder: str, origin: str, missing: Mapping[Path, list[str]], forms: str = "") -> ValueError:
    """Return the error for a data set that no folder of `NORMKIT_DATA` has.

    `missing` has the files that each folder lacks, `forms` what they may end in.
    """
    where = f"{VARIABLE} is not set; set it to a folder that holds {folder}/"
    if missing:
        nearest = min(missing, key=lambda each: len(missing[each]))
        where = f"{nearest} lacks {', '.join(missing[nearest])}{forms}"
    return ValueError(f"the data set {name} is not here: {where}. Get it from {origin}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A row of the table of texts; `corpora.toml` explains its keys."""

    name: str
    folder: str
    sides: tuple[str, ...]
    train: tuple[str, ...]
    valid: tuple[str, ...]
    test: tuple[str, ...]
    columns: tuple[int, ...] = ()
    subwords: int = 8000
    tokenized: bool = True
    compounds: bool = False
    split_words: bool = False
    instead: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    files: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    origin: str

    @property
    def kind(self) -> Literal["parallel", "text"]:
        """Parallel text in two languages, or running text."""
        return "text" if len(self.sides) == 1 else "parallel"


CORPORA: dict[str, Corpus] = {name: Corpus(name=name, **row) for name, row in table("text").items()}
"""By name."""


class Located(NamedTuple):
    """A corpus whose files were found."""

    corpus: Corpus
    files: dict[str, list[tuple[Path, ...]]]
    """Files of each split, one after another: source and target, or one file."""
    known: dict[Path, dict[str, Any]]
    """Lines and MD5 of files that the table has."""
    partial: str
    """What is missing or replaced; empty if nothing."""

    @property
    def name(self) -> str:
        """The name, and what is missing."""
        return f"{self.corpus.name} ({self.partial})" if self.partial else self.corpus.name

    def lines(self, split: str) -> Iterator[tuple[str, ...]]:
        """Yield the lines of a split: source and target, or one."""
        corpus = self.corpus
        for paths in self.files[split]:
            if corpus.kind == "text":
                yield from ((line,) for line in read_lines(paths[0]))
            elif not corpus.columns:
                pairs = read_pairs(*paths)
                yield from ((words(one), words(two)) for one, two in pairs) if corpus.split_words else pairs
            else:
                pairs = read_columns(paths[0], *corpus.columns)
                shared = self.files["train"] == self.files["test"]
                yield from (pair for pair in pairs if not shared or split_of(pair[1]) == split)


def words(text: str) -> str:
    r"""Undo escapes and split off punctuation, so that texts of several tokenizations become alike.

    >>> words("it &apos;s well-known .") == words("it\u2019s well-known.")
    True
    """
    return " ".join(re.findall(r"\w+|[^\w\s]", unicodedata.normalize("NFC", html.unescape(text)).translate(QUOTES)))


def locate(name: str) -> Located:
    """Find the files of a corpus.

    Args:
        name: A row of CORPORA; or a folder of your own, with `train.source`, `train.target`, `valid.source` ...; with
            `train.tsv` ..., a tab between source and target; or, of running text, with `train.txt` ....

    Raises:
        ValueError: If the name is unknown or files are missing; the message names them and their source.
    """
    if name in CORPORA:
        corpus = CORPORA[name]
        missing = {}
        for folder in [root / part for root in data_roots() for part in (corpus.folder, name)]:
            if isinstance(found := _in_folder(corpus, folder), Located):
                return found
            missing[folder] = found
        raise not_here(name, corpus.folder, corpus.origin, missing, " (plain, .xz or .gz)")
    if not Path(name).is_dir():
        raise unknown(CORPORA, name, "corpus", ", or name a folder of text files")
    folder = Path(name).absolute()  # "." has no name
    forms: tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...] = (
        ("{}.{{}}", ("source", "target"), ()),
        ("{}.tsv", ("source", "target"), (0, 1)),
        ("{}.txt", ("words",), ()),
    )
    lacking = []
    for pattern, sides, columns in forms:
        splits: dict[str, Any] = {split: (pattern.format(split),) for split in SPLITS}
        size = 8000 if len(sides) == 2 else 0
        own = Corpus(name=folder.name, folder="", sides=sides, columns=columns, tokenized=False, subwords=size,
                     origin="its owner", **splits)  # fmt: skip
        if isinstance(found := _in_folder(own, folder), Located):
            return found
        lacking.append(", ".join(found))
    raise ValueError(f"{folder} has no text: it lacks {'; or '.join(lacking)}")


def _in_folder(corpus: Corpus, folder: Path) -> Located | list[str]:
    """Return the corpus in a folder, or the files that are missing there."""
    files, missing, known, remarks = {}, [], {}, []
    for split in SPLITS:
        patterns, other = getattr(corpus, split), corpus.instead.get(split, {})
        found, lacking = _find(corpus, folder, patterns, known)
        if lacking and other:
            replaced, still = _find(corpus, folder, other["files"], known)
            if not still:
                found, lacking = replaced, []
                remarks.append(other["remark"])
                corpus = dataclasses.replace(corpus, split_words=other.get("split_words", corpus.split_words))
        files[split] = found
        missing += lacking
    return list(dict.fromkeys(missing)) or Located(corpus, files, known, ", ".join(remarks))


def _find(
    corpus: Corpus, folder: Path, patterns: tuple[str, ...], known: dict[Path, dict[str, Any]]
) -> tuple[list[tuple[Path, ...]], list[str]]:
    """Return the files of a split and the names of those that are missing; add to `known`."""
    parts, missing = [], []
    for pattern in patterns:
        names = list(dict.fromkeys(pattern.format(side) for side in corpus.sides))
        paths = [find_file(folder / name) for name in names]
        missing += [name for name, path in zip(names, paths, strict=True) if path is None]
        known |= {path: corpus.files[name] for name, path in zip(names, paths, strict=True)
                  if path is not None and name in corpus.files}  # fmt: skip
        parts.append(tuple(path for path in paths if path is not None))
    return parts, missing
