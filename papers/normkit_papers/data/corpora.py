"""Text corpora of the papers: names, files, expected sizes, sources.

`NORMKIT_DATA` lists folders (separated by colons, on Windows semicolons) that contain a folder for each corpus. A path
in place of a name is such a folder itself. Files may be plain, `.xz` or `.gz`. `locate` finds the files;
`normkit_papers.data.prepare` reads them and checks their sizes.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from normkit._util import unknown
from normkit_papers.data.lines import find_file, read_lines

VARIABLE = "NORMKIT_DATA"
SPLITS = ("train", "valid", "test")


class Known(NamedTuple):
    """Number of lines of a file, and the MD5 of its decompressed content if it is published."""

    lines: int
    md5: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus: the files of each split (source and target, or one of running text).

    If both sides are in one file, they are tab-separated columns. `instead` has files that replace those of a split
    that are missing, with the remark that the name then gets.
    """

    name: str
    folder: str
    kind: Literal["parallel", "text"]
    files: dict[str, tuple[str, ...]]
    known: dict[str, Known] = dataclasses.field(default_factory=dict)
    columns: tuple[int, int] = (0, 1)
    """Columns of source and target, from 0, if one file has both; one file of all splits is split by its targets."""
    subwords: int = 8000
    """Size of each vocabulary, as in the papers; 0: words, separated by spaces."""
    tokenized: bool = True
    """Words and punctuation are separated by spaces, and BLEU is computed on them."""
    compounds: bool = False
    """BLEU splits compounds at hyphens, as the papers do on WMT."""
    instead: dict[str, tuple[tuple[str, ...], str]] = dataclasses.field(default_factory=dict)
    origin: str
    """Source."""


class Located(NamedTuple):
    """A corpus whose files were found; `partial` describes what is missing or replaced."""

    corpus: Corpus
    files: dict[str, tuple[Path, ...]]
    partial: str

    @property
    def name(self) -> str:
        """The name, and what is missing."""
        return f"{self.corpus.name} ({self.partial})" if self.partial else self.corpus.name


def _sides(pattern: str, source: str, target: str) -> tuple[str, str]:
    return pattern.format(source), pattern.format(target)


def _ted(language: str, subwords: int, counts: tuple[int, int, int], md5: dict[str, str] | None = None) -> Corpus:
    folder = f"{language}_en"
    files = {split: _sides(f"{folder}/{file}.{{}}", language, "en") for split, file in
             zip(SPLITS, ("train", "dev", "test"), strict=True)}  # fmt: skip
    lines = {file: count for split, count in zip(SPLITS, counts, strict=True) for file in files[split]}
    return Corpus(
        name=f"ted.{language}",
        folder="ted_lowres",
        kind="parallel",
        files=files,
        known={file: Known(count, (md5 or {}).get(file)) for file, count in lines.items()},
        subwords=subwords,
        origin="the TED corpus of Qi et al. 2018 (github.com/neulab/word-embeddings-for-nmt), "
        f"as {folder}/train.{language}, train.en, dev.*, test.*, Moses-tokenized",
    )


_ROWS = [
    Corpus(
        name="multi30k.de-en",
        folder="multi30k_de_en",
        kind="parallel",
        files={
            "train": _sides("tok/train.lc.norm.tok.{}", "de", "en"),
            "valid": _sides("tok/val.lc.norm.tok.{}", "de", "en"),
            "test": _sides("tok/test_2016_flickr.lc.norm.tok.{}", "de", "en"),
        },
        known={
            "tok/train.lc.norm.tok.de": Known(29_000, "4380018035b602bd0d0c4f369918dfde"),
            "tok/train.lc.norm.tok.en": Known(29_000, "11ac4eac7988e6bd46cabe9755b71d26"),
            "tok/val.lc.norm.tok.de": Known(1_014, "579f1cd1c81ae3917e4485613e0a62f7"),
            "tok/val.lc.norm.tok.en": Known(1_014, "02902c626a88ec3c0a56cca3c5bb77fe"),
            "tok/test_2016_flickr.lc.norm.tok.de": Known(1_000, "3054f8453b394c41d17df5c15849b5c8"),
            "tok/test_2016_flickr.lc.norm.tok.en": Known(1_000, "09aa5360d1e0ae3e03742297eb720d7d"),
        },
        origin="github.com/multi30k/dataset, data/task1/tok",
    ),
    Corpus(
        name="iwslt14.de-en",
        folder="iwslt14_de_en",
        kind="parallel",
        files={split: _sides(f"{split}.{{}}", "de", "en") for split in SPLITS},
        known={
            "train.de": Known(160_239),
            "train.en": Known(160_239),
            "train_partial.de": Known(53_561, "dd96b50d92d526580915e3597608512c"),
            "train_partial.en": Known(53_561, "b46a0c36d01591411ec39207ff5808ac"),
            "valid.de": Known(7_283, "953cd9a0d85f996861f8f77d93e67f72"),
            "valid.en": Known(7_283, "481d704963d0a48c29c8822df0c30630"),
            "test.de": Known(6_750, "0112fd69eacd47e34cd3df11698ff5bc"),
            "test.en": Known(6_750, "6478cd81d3e2f679fe72c32d43ef659e"),
        },
        instead={
            "train": (_sides("train_partial.{}", "de", "en"), "53,561 of its 160,239 training pairs"),
        },
        subwords=10_000,
        origin="fairseq's examples/translation/prepare-iwslt14.sh, its tmp folder before BPE",
    ),
    Corpus(
        name="iwslt15.en-vi",
        folder="iwslt15_en_vi",
        kind="parallel",
        files={
            "train": _sides("train.{}", "en", "vi"),
            "valid": _sides("tst2012.{}", "en", "vi"),
            "test": _sides("tst2013.{}", "en", "vi"),
        },
        known={
            "train.en": Known(133_317),
            "train.vi": Known(133_317),
            "tst2012.en": Known(1_553, "c14a0955ed8b8d6929fdabf4606e3875"),
            "tst2012.vi": Known(1_553, "dddf990faa149e980b11a36fca4a8898"),
            "tst2013.en": Known(1_268, "c41c43cb6d3b122c093ee89608ba62bd"),
            "tst2013.vi": Known(1_268, "a3185b00264620297901b647a4cacf38"),
        },
        origin="the Stanford NMT page (nlp.stanford.edu/projects/nmt), IWSLT'15 English-Vietnamese",
    ),
    _ted(
        "gl",
        3000,
        (11_233, 742, 1_112),
        {
            "gl_en/train.gl": "0bab35e777f135ecadf8e94f887d2a42",
            "gl_en/train.en": "a4390b0b5eadf9793806289ada8e8cc7",
            "gl_en/dev.gl": "fffb3abbf1ae58a1013fd2ee12bef33d",
            "gl_en/dev.en": "9f10fecc5277a477db1adc6d6e6c53aa",
            "gl_en/test.gl": "15346a03a1636ac5763d7933e23d55d9",
            "gl_en/test.en": "e8a319306bc902266c17243a82c3c503",
        },
    ),
    _ted(
        "sk",
        8000,
        (61_470, 2_271, 2_445),
        {
            "sk_en/test.sk": "2be1c75be57ae51b2e500f2cd08ff2f0",
            "sk_en/test.en": "ad963e8a5417a7497ec155935a1e8160",
        },
    ),
    _ted("he", 8000, (211_819, 4_515, 5_508)),
    _ted("ar", 8000, (214_111, 4_714, 5_953)),
    Corpus(
        name="wmt14.en-de",
        folder="wmt_en_de",
        kind="parallel",
        files={split: _sides(f"{split}.{{}}", "en", "de") for split in SPLITS},
        known={
            "valid.en": Known(3_000),
            "valid.de": Known(3_000),
            "test.en": Known(3_003),
            "test.de": Known(3_003),
            "sample10k.en": Known(10_000, "698a0de1052ab9bd07b27f83a2b09a28"),
            "sample10k.de": Known(10_000, "d3fb2ce4caf79e4bd4fa69c2bc1e3687"),
            "newstest2012.first3000.en": Known(3_000, "9f5afe9dc82605572bd83739b120a9c1"),
            "newstest2012.first3000.de": Known(3_000, "5ecaac25ff4d5612e3066cbce6bb1517"),
            "newstest2014.filtered2737.en": Known(2_737, "08d3522f6be20320b56e89392055bcdb"),
            "newstest2014.filtered2737.de": Known(2_737, "55f3fa8aac7e740ef5cc8fa563d82ea4"),
        },
        instead={
            "train": (_sides("sample10k.{}", "en", "de"), "10,000 of its training pairs"),
            "valid": (_sides("newstest2012.first3000.{}", "en", "de"), "newstest2012 for valid"),
            "test": (_sides("newstest2014.filtered2737.{}", "en", "de"), "2,737 of 3,003 test pairs"),
        },
        subwords=32_764,
        compounds=True,
        origin="fairseq's examples/translation/prepare-wmt14en2de.sh (europarl v7, commoncrawl, news commentary v12; "
        "valid newstest2013, test newstest2014), Moses-tokenized, before BPE",
    ),
    Corpus(
        name="wmt14.en-fr",
        folder="wmt14_en_fr",
        kind="parallel",
        files={split: _sides(f"{split}.{{}}", "en", "fr") for split in SPLITS},
        known={"test.en": Known(3_003), "test.fr": Known(3_003)},
        subwords=37_000,
        origin="fairseq's examples/translation/prepare-wmt14en2fr.sh, Moses-tokenized, before BPE",
    ),
    Corpus(
        name="tatoeba.de-en",
        folder="tatoeba",
        kind="parallel",
        files=dict.fromkeys(SPLITS, ("deu-eng.tsv", "deu-eng.tsv")),
        known={"deu-eng.tsv": Known(169_197, "a60519c51f3739d780689fdb0fe2a86d")},
        tokenized=False,
        columns=(1, 0),
        origin="manythings.org/anki, deu-eng.zip (of 2018-04-07), as deu-eng.tsv",
    ),
    Corpus(
        name="ptb",
        folder="ptb",
        kind="text",
        files={split: (f"ptb.{split}.txt",) for split in SPLITS},
        known={
            "ptb.train.txt": Known(42_068, "f26c4b92c5fdc7b3f8c7cdcb991d8420"),
            "ptb.valid.txt": Known(3_370, "aa0affc06ff7c36e977d7cd49e3839bf"),
            "ptb.test.txt": Known(3_761, "8b80168b89c18661a38ef683c0dc3721"),
        },
        subwords=0,
        origin="Mikolov's Penn Treebank, simple-examples/data (fit.vutbr.cz/~imikolov/rnnlm)",
    ),
    *[
        Corpus(
            name=f"wikitext-{size}",
            folder=f"wikitext{size}",
            kind="text",
            files={split: (f"wiki.{split}.tokens",) for split in SPLITS},
            known=known,
            subwords=0,
            origin=f"Merity et al. 2016, wikitext-{size}-v1.zip (huggingface.co/datasets/Salesforce/wikitext)",
        )
        for size, known in {
            "2": {
                "wiki.train.tokens": Known(36_718, "34a77ebe59551b3a3b3d8c0a2797c976"),
                "wiki.valid.tokens": Known(3_760, "d756d22ab2310e7e60c094bea5c5a8eb"),
                "wiki.test.tokens": Known(4_358, "781c9418ab9414bd09e4aad825aae752"),
            },
            "103": {
                "wiki.train.tokens": Known(1_801_350),
                "wiki.valid.tokens": Known(3_760),
                "wiki.test.tokens": Known(4_358),
            },
        }.items()
    ],
]

CORPORA: dict[str, Corpus] = {corpus.name: corpus for corpus in _ROWS}
"""By name."""


def data_roots() -> list[Path]:
    """Return the folders that `NORMKIT_DATA` lists."""
    return [Path(root) for root in os.environ.get(VARIABLE, "").split(os.pathsep) if root]


def not_here(what: str, name: str, origin: str, missing: Mapping[Path, list[str]], forms: str = "") -> ValueError:
    """Return the error for a data set that is in no folder `name`.

    `missing` has the files that each folder lacks, `forms` what they may end in.
    """
    where = f"{VARIABLE} is not set; set it to a folder that holds {name}/"
    if missing:
        nearest = min(missing, key=lambda folder: len(missing[folder]))
        where = f"{nearest} lacks {', '.join(missing[nearest])}{forms}"
    return ValueError(f"{what} is not here: {where}. Get it from {origin}")


def locate(name: str) -> Located:
    """Find the files of a corpus, by its name or in a folder.

    A folder is that of a corpus of the table if it has all of its files and its name, or its numbers of lines. Else it
    has `train.source`, `train.target`, `valid.source` ...; or `train.tsv` ... with columns for source and target; or,
    for running text, `train.txt`, `valid.txt` and `test.txt`.

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
        raise not_here(f"the corpus {name}", corpus.folder, corpus.origin, missing, " (plain, .xz or .gz)")
    if Path(name).is_dir():
        return _own(Path(name).absolute())  # "." has no name
    raise unknown(CORPORA, name, "corpus", ", or name a folder of text files")


def _own(folder: Path) -> Located:
    """Find text in a folder: a corpus of the table, or your own."""
    tries = [_in_folder(corpus, folder) for corpus in CORPORA.values()]
    alike = [found for found in tries if isinstance(found, Located)]
    named = [one for one in alike if folder.resolve().name in (one.corpus.folder, one.corpus.name)]
    known = named or [one for one in alike if _as_long(one, folder)]
    if known:
        return known[0]
    pairs = {split: _sides(f"{split}.{{}}", "source", "target") for split in SPLITS}
    tables = {split: (f"{split}.tsv", f"{split}.tsv") for split in SPLITS}
    texts = {split: (f"{split}.txt",) for split in SPLITS}
    kinds: list[tuple[Literal["parallel", "text"], dict]] = [("parallel", pairs), ("parallel", tables), ("text", texts)]
    for kind, files in kinds:
        own = Corpus(name=folder.name, folder=folder.name, kind=kind, files=files, tokenized=False, origin="its owner",
                     subwords=8000 if kind == "parallel" else 0)  # fmt: skip
        found = _in_folder(own, folder)
        if isinstance(found, Located):
            return found
    lacking = [file for split in SPLITS for file in pairs[split] if find_file(folder / file) is None]
    other = f"; it has files named as those of {alike[0].corpus.name}, but not its lines" if alike else ""
    raise ValueError(
        f"{folder} lacks {', '.join(lacking)}; needs a source and a target of {', '.join(SPLITS)} (or as columns of "
        f"train.tsv ...; of running text, train.txt ...){other}"
    )


def _as_long(located: Located, folder: Path) -> bool:
    """Return True if all files have the lines of the table; small files are read first."""
    files = sorted({path for split in located.files.values() for path in split}, key=lambda path: path.stat().st_size)
    names = {path: str(path.relative_to(folder).as_posix()).removesuffix(".xz").removesuffix(".gz") for path in files}
    wanted = {path: located.corpus.known[name].lines for path, name in names.items() if name in located.corpus.known}
    return all(sum(1 for _ in read_lines(path)) == lines for path, lines in wanted.items())


def _in_folder(corpus: Corpus, folder: Path) -> Located | list[str]:
    """Return the corpus in a folder, or the files that are missing there."""
    files, missing, partial = {}, [], []
    for split, names in corpus.files.items():
        found = [find_file(folder / file) for file in names]
        if None in found and split in corpus.instead:
            others, remark = corpus.instead[split]
            found = [find_file(folder / file) for file in others]
            partial += [] if None in found else [remark]
        missing += [file for file, path in zip(names, found, strict=True) if path is None]
        files[split] = tuple(path for path in found if path is not None)
    return list(dict.fromkeys(missing)) or Located(corpus, files, ", ".join(partial))
