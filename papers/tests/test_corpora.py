"""Readers of text, the table of corpora, and the arrays that are made of them."""

import dataclasses
import errno
import gzip
import lzma
import os
import pathlib

import numpy as np
import pytest
import torch
from corpus_files import sentences, write_corpus, write_text
from normkit_papers.data import prepare as preparing
from normkit_papers.data.corpora import CORPORA, Known, locate
from normkit_papers.data.lines import read_columns, read_lines, read_pairs
from normkit_papers.data.prepare import prepare
from normkit_papers.data.subwords import Subwords, vocabulary
from normkit_papers.data.vocab import BOS, EOS, SPECIAL, UNK

SHARED = pathlib.Path(__file__).parents[3] / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the data sets beside the checkout are not there")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NORMKIT_DATA", raising=False)
    return tmp_path / "cache"


def test_plain_and_compressed_files_are_read_alike(tmp_path):
    text = "\ufeffein Haus\r\nä \u2028 b\n\nEnde".encode()
    (tmp_path / "a").write_bytes(text)
    (tmp_path / "a.gz").write_bytes(gzip.compress(text))
    (tmp_path / "a.xz").write_bytes(lzma.compress(text))
    for name in ("a", "a.gz", "a.xz"):
        assert list(read_lines(tmp_path / name)) == ["ein Haus", "ä \u2028 b", "", "Ende"]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_file_cut_short_is_named_with_its_line(tmp_path, pack):
    path = tmp_path / ("a.gz" if pack is gzip.compress else "a.xz")
    whole = pack(os.urandom(3000).hex().encode() + b"\nx\n")
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"a\.[gx]z is cut short or damaged after line 0"):
        list(read_lines(path))


def test_other_encodings_are_named_with_their_line(tmp_path):
    (tmp_path / "a").write_bytes("ein\nHäuschen\n".encode("latin1"))
    with pytest.raises(ValueError, match=r"not UTF-8.*byte 1 of line 2; convert it.*iconv"):
        list(read_lines(tmp_path / "a"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf16_is_distinguished_from_other_encodings(tmp_path, encoding):
    """Without its mark at the beginning, UTF-16 of Latin letters is UTF-8 full of zeros."""
    (tmp_path / "a").write_bytes("ein\nHaus\n".encode(encoding))
    with pytest.raises(ValueError, match=r"a is not UTF-8 text: line 1 has a byte 0; .*iconv -f utf16"):
        list(read_lines(tmp_path / "a"))


def test_misaligned_and_empty_lines_are_named(tmp_path):
    (tmp_path / "a").write_text("x\ny\nz\n")
    (tmp_path / "b").write_text("x\ny\n")
    (tmp_path / "c").write_text("x\n \nz\n")
    with pytest.raises(ValueError, match=r"b is misaligned with .*a: 2 lines against 3"):
        list(read_pairs(tmp_path / "a", tmp_path / "b"))
    with pytest.raises(ValueError, match=r"line 2 of .*c is empty on one side"):
        list(read_pairs(tmp_path / "a", tmp_path / "c"))
    (tmp_path / "d").write_text("")
    with pytest.raises(ValueError, match="d is empty"):
        list(read_pairs(tmp_path / "d", tmp_path / "d"))


def test_columns_are_taken_by_number(tmp_path):
    (tmp_path / "a.tsv").write_text("go .\tgeh  weg\tx\nhi\thallo\n")
    assert list(read_columns(tmp_path / "a.tsv", 1, 0)) == [("geh weg", "go ."), ("hallo", "hi")]
    (tmp_path / "a.tsv").write_text("go\tgeh\nhi hallo\n")
    with pytest.raises(ValueError, match=r"line 2 of .* has 1 columns between tabs; needs 2"):
        list(read_columns(tmp_path / "a.tsv", 1, 0))


@pytest.mark.parametrize("punctuation", [False, True])
def test_subwords_spell_what_they_read(punctuation):
    lines = [source for source, _ in sentences(100, 0)] + ["so, so!", "don't"]
    words = Subwords.learn(lines, 60, punctuation)
    assert len(words) <= 60
    for line in [*lines, "kalomi  ne", "so !"]:
        numbers = words.encode_text(line)
        assert UNK not in numbers
        assert words.text([BOS, *numbers, EOS, 5]) == " ".join(line.split())
    assert UNK in words.encode_text("Q")
    again = vocabulary(words.plain())
    assert isinstance(again, Subwords)
    assert again.encode_texts(lines) == words.encode_texts(lines)
    assert words.encode_texts([f"  {lines[0]}\t "]) == [words.encode_text(lines[0])], "as text files may have them"
    with pytest.raises(ValueError, match="not a vocabulary of subwords"):
        vocabulary({"symbols": ["a"]})


def test_text_cannot_contain_the_end_or_padding():
    """A merge to "</s>", as in HTML, would end the sentence there."""
    beside = [f"{first}{tag}{last}" for tag in SPECIAL for first in "abcd" for last in "efgh"]
    words = Subwords.learn(beside, 60)
    for word in ("a</s>e", "d<pad>f", "b<s>c<unk>h"):
        numbers = words.encode_text(word)
        assert not {*range(len(SPECIAL))} & {*numbers}
        assert words.text(numbers) == word
    assert words.encode_text("aQe")[-2:] == [UNK, *words.encode_text("ae")[-1:]], "unknown characters do not merge"


@pytest.mark.parametrize("share", [False, True])
def test_a_folder_of_text_becomes_arrays(tmp_path, share, cache):
    data = prepare(locate(str(write_corpus(tmp_path / "mine"))), subwords=60, share=share)
    assert (len(data.train), len(data.valid), len(data.test)) == (300, 20, 30)
    source, target = data.vocabularies["source"], data.vocabularies["target"]
    assert (source is target) == share
    for split in ("train", "valid", "test"):
        for place, (one, two) in enumerate(data.lines(split)):
            bitext = getattr(data, split)
            assert bitext.source[place][-1] == bitext.target[place][-1] == EOS
            assert (source.text(bitext.source[place]), target.text(bitext.target[place])) == (one, two)
    assert isinstance(data.train.source.flat, np.memmap), "it is read on access"
    padded = data.train.source.padded([3, 4])
    assert padded[0, : len(data.train.source[3])].tolist() == data.train.source[3]


def test_two_columns_of_a_file_are_two_sides(tmp_path):
    plain, tables = write_corpus(tmp_path / "plain"), tmp_path / "tables"
    tables.mkdir()
    for split in ("train", "valid", "test"):
        sides = [(plain / f"{split}.{side}").read_text(encoding="utf8").splitlines() for side in ("source", "target")]
        (tables / f"{split}.tsv").write_text("".join(f"{one}\t{two}\n" for one, two in zip(*sides, strict=True)))
    two, one = (prepare(locate(str(folder)), subwords=60) for folder in (plain, tables))
    for split in ("train", "valid", "test"):
        assert list(one.lines(split)) == list(two.lines(split))
        assert np.array_equal(getattr(one, split).target.flat, getattr(two, split).target.flat)


def test_text_is_prepared_once_and_again_when_it_changes(tmp_path, cache, monkeypatch):
    folder = write_corpus(tmp_path / "mine")
    stages = []
    prepare(locate(str(folder)), subwords=60, on_stage=stages.append)
    assert "learning subwords" in stages
    stages.clear()
    prepare(locate(str(folder)), subwords=60, on_stage=stages.append)
    assert stages == []
    with (folder / "train.source").open("a") as source, (folder / "train.target").open("a") as target:
        source.write("ka\n")
        target.write("one\n")
    assert len(prepare(locate(str(folder)), subwords=60, on_stage=stages.append).train) == 301
    assert "learning subwords" in stages


def test_interrupted_work_resumes_to_the_same_arrays(tmp_path, monkeypatch):
    folder = write_corpus(tmp_path / "mine")
    whole = prepare(locate(str(folder)), subwords=60)
    monkeypatch.setenv("NORMKIT_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(preparing, "CHUNK", 70)
    append, calls = preparing._append, []

    def full_disk(path, values):
        calls.append(path)
        append(path, values)
        if len(calls) == 7:  # in the middle of a piece: one side is written, its sizes are not
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(preparing, "_append", full_disk)
    with pytest.raises(OSError, match=r"no space left in .*other; finished work is kept"):
        prepare(locate(str(folder)), subwords=60)
    stages = []
    resumed = prepare(locate(str(folder)), subwords=60, on_stage=stages.append)
    assert "encoding train, line 70" in stages
    assert "encoding train, line 0" not in stages
    for split in ("train", "valid", "test"):
        for one, two in zip(getattr(whole, split), getattr(resumed, split), strict=True):
            assert np.array_equal(one.flat, two.flat)
            assert np.array_equal(one.offsets, two.offsets)
    assert whole.facts == resumed.facts


def test_text_is_prepared_on_file_systems_without_locks(tmp_path, monkeypatch):
    fcntl = pytest.importorskip("fcntl")

    def no_locks(file, how):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    stages = []
    assert len(prepare(locate(str(write_corpus(tmp_path / "mine"))), subwords=60, on_stage=stages.append).train) == 300
    assert not any("waiting" in stage for stage in stages)


@pytest.mark.parametrize(
    ("name", "content"),
    [("train.source.numbers", None), ("valid.target.sizes", None), ("vocab.json", b"{}"), ("vocab.json", b"\xff"),
     ("train.json", b"{}"), ("test.json", b"[]")],
)  # fmt: skip
def test_a_damaged_cache_is_rebuilt(name, content, tmp_path, cache):
    located = locate(str(write_corpus(tmp_path / "mine")))
    whole = prepare(located, subwords=60)
    wanted = {split: [list(side) for side in getattr(whole, split)] for split in preparing.SPLITS}
    (path,) = cache.glob(f"mine-*/{name}")
    path.write_bytes(path.read_bytes()[:-6] if content is None else content)
    again = prepare(located, subwords=60)
    for split, sides in wanted.items():
        assert [list(side) for side in getattr(again, split)] == sides
    assert again.facts == whole.facts


def test_a_damaged_record_of_a_file_is_rebuilt(tmp_path, cache):
    located = locate(str(write_corpus(tmp_path / "mine")))
    facts = prepare(located, subwords=60).facts
    for note in (cache / "digests").iterdir():
        note.write_text("{}")
    assert prepare(located, subwords=60).facts == facts


def test_a_whole_cache_is_only_read(tmp_path, cache, monkeypatch):
    located = locate(str(write_corpus(tmp_path / "mine")))
    facts = prepare(located, subwords=60).facts
    (folder,) = cache.glob("mine-*")
    (folder / "lock").unlink()
    before = {path: path.stat().st_mtime_ns for path in [cache, *cache.rglob("*")]}
    assert prepare(located, subwords=60).facts == facts
    assert {path: path.stat().st_mtime_ns for path in [cache, *cache.rglob("*")]} == before


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


def test_many_unknown_words_raise(tmp_path):
    folder = write_corpus(tmp_path / "mine")
    (folder / "test.source").write_text("ЖЖЖЖ ЩЩЩЩ\n" * 30, encoding="utf8")
    with pytest.raises(ValueError, match=r"\d+ % of the symbols of .*test\.source are unknown.*one language, script"):
        prepare(locate(str(folder)), subwords=60)


def test_a_missing_corpus_raises_with_its_source(tmp_path, monkeypatch):
    for corpus in CORPORA.values():
        with pytest.raises(ValueError, match=r"is not here: NORMKIT_DATA is not set; .* Get it from .+"):
            locate(corpus.name)
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "ptb.train.txt.xz").write_bytes(lzma.compress(b"a\n"))
    with pytest.raises(ValueError, match=r"ptb lacks ptb\.valid\.txt, ptb\.test\.txt \(plain, \.xz or \.gz\)"):
        locate("ptb")
    with pytest.raises(ValueError, match=r"no corpus named 'ptp'.*did you mean 'ptb'"):
        locate("ptp")
    with pytest.raises(ValueError, match=r"lacks train\.source"):
        locate(str(tmp_path))


def test_files_of_a_corpus_must_be_those_of_the_table(tmp_path, monkeypatch):
    folder = write_text(tmp_path / "ptb")
    for split in ("train", "valid", "test"):
        (folder / f"{split}.txt").rename(folder / f"ptb.{split}.txt")
    with pytest.raises(ValueError, match=r"ptb\.train\.txt has 200 lines, ptb has 42,068; it was cut short"):
        prepare(locate(str(folder)))
    files = CORPORA["ptb"].known
    lines = {name: Known(len((folder / name).read_text(encoding="utf8").splitlines()), known.md5)
             for name, known in files.items()}  # fmt: skip
    monkeypatch.setitem(CORPORA, "ptb", dataclasses.replace(CORPORA["ptb"], known=lines))
    with pytest.raises(ValueError, match=r"is not that file of ptb: its MD5 is .*not f26c4b92"):
        prepare(locate(str(folder)))


def write_sides(folder, counts, sides=("de", "en")):
    folder.mkdir()
    for split, count in counts.items():
        for side, lines in zip(sides, zip(*sentences(count, count), strict=True), strict=True):
            (folder / f"{split}.{side}").write_text("".join(f"{line}\n" for line in lines), encoding="utf8")
    return folder


def test_folder_is_recognised_as_corpus_by_name_or_lines(tmp_path, monkeypatch):
    """IWSLT14 de-en and WMT14 en-de have files of the same names.

    Their sides are in opposite order.
    """
    counts = {"iwslt14.de-en": {"train": 40, "valid": 9, "test": 8}, "wmt14.en-de": {"valid": 7, "test": 6}}
    for name, lines in counts.items():
        known = {f"{split}.{side}": Known(count) for split, count in lines.items() for side in ("de", "en")}
        monkeypatch.setitem(CORPORA, name, dataclasses.replace(CORPORA[name], known=known))
    wmt = locate(str(write_sides(tmp_path / "some", {"train": 50, "valid": 7, "test": 6})))
    assert (wmt.name, [path.suffix for path in wmt.files["train"]]) == ("wmt14.en-de", [".en", ".de"])
    iwslt = locate(str(write_sides(tmp_path / "other", {"train": 40, "valid": 9, "test": 8})))
    assert (iwslt.name, [path.suffix for path in iwslt.files["train"]]) == ("iwslt14.de-en", [".de", ".en"])
    folder = write_sides(tmp_path / "mine", {"train": 40, "valid": 9, "test": 7})
    with pytest.raises(ValueError, match=r"lacks train\.source.*named as those of iwslt14\.de-en, but not its lines"):
        locate(str(folder))
    for path in write_corpus(tmp_path / "own").iterdir():
        path.rename(folder / path.name)
    assert locate(str(folder)).name == "mine"
    folder = write_sides(tmp_path / "iwslt14_de_en", {"train": 39, "valid": 9, "test": 8})
    with pytest.raises(ValueError, match=r"train\.de has 39 lines, iwslt14\.de-en has 40; it was cut short"):
        prepare(locate(str(folder)))


def test_a_partial_corpus_has_a_remark(tmp_path, monkeypatch):
    folder = tmp_path / "iwslt14_de_en"
    folder.mkdir()
    for split, count in (("train_partial", 50), ("valid", 5), ("test", 5)):
        pairs = list(sentences(count, count))
        for side, at in (("de", 0), ("en", 1)):
            (folder / f"{split}.{side}").write_text("".join(f"{pair[at]}\n" for pair in pairs), encoding="utf8")
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    assert locate("iwslt14.de-en").name == "iwslt14.de-en (53,561 of its 160,239 training pairs)"
    for side in ("de", "en"):
        (folder / f"train_partial.{side}").rename(folder / f"train.{side}")
    assert locate("iwslt14.de-en").name == "iwslt14.de-en"


def test_two_sides_in_one_file_are_split_by_target(tmp_path, monkeypatch):
    path = tmp_path / "tatoeba" / "deu-eng.tsv"
    path.parent.mkdir()
    rows = [f"{two} {number % 150}\t{one} {number}\n" for number, (one, two) in enumerate(sentences(400, 0))]
    path.write_text("".join(rows), encoding="utf8")
    table = {"deu-eng.tsv": Known(400)}
    monkeypatch.setitem(CORPORA, "tatoeba.de-en", dataclasses.replace(CORPORA["tatoeba.de-en"], known=table))
    monkeypatch.setenv("NORMKIT_DATA", str(tmp_path))
    data = prepare(locate("tatoeba.de-en"), subwords=80, share=True)
    assert len(data.train) + len(data.valid) + len(data.test) == 400
    targets = {split: {two for _, two in data.lines(split)} for split in ("train", "valid", "test")}
    assert not targets["train"] & targets["test"]
    assert targets["test"]


@pytest.mark.shared
@needs_shared
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("ptb", (929_590, 73_761, 82_431)), ("ted.gl", (11_233, 742, 1_112)), ("multi30k.de-en", (29_000, 1_014, 1_000))],
)
def test_corpora_beside_the_checkout_are_whole(name, sizes, monkeypatch):
    monkeypatch.setenv("NORMKIT_DATA", str(SHARED))
    located = locate(name)
    assert located.name == name
    data = prepare(located, share=located.corpus.kind == "parallel")
    assert (len(data.train), len(data.valid), len(data.test)) == sizes
    if name == "ptb":
        assert len(data.vocabularies["words"]) == 10_000 + 2, "two of ours, for padding and the begin, never follow"
        assert isinstance(data.train, torch.Tensor)
