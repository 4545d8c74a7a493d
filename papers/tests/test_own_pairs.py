"""Training on sequence pairs of your own."""

import pytest
from corpus_files import write_pairs
from normkit_papers.data.embedded import reader
from normkit_papers.inference import translate_lines
from normkit_papers.models.config import Model
from normkit_papers.train.build import build_model
from normkit_papers.train.config import G2PRun
from normkit_papers.train.folder import Loaded
from normkit_papers.train.run import train
from normkit_papers.train.source import open_task


def test_a_model_of_plain_files_translates_their_lines(tmp_path):
    data = write_pairs(tmp_path, train_source="HH AH\nAH L\n", valid_source="AH\n", test_source="HH L\nAH\nAH L\n")
    run = G2PRun(name="x", data=str(data), model=Model(width=8, hidden=8, depth=1, heads=2), steps=1,
              record_every=0, threads=1)  # fmt: skip
    train(run, tmp_path / "run")
    assert len(list(translate_lines(tmp_path / "run", ["HH AH L"]))) == 1
    with pytest.raises(ValueError, match=r"^line 1: 'h' "):
        list(translate_lines(tmp_path / "run", ["HH X"]))


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_sequences_longer_than_the_model_raise_before_training(split, tmp_path):
    data = write_pairs(tmp_path)
    count = len((data / f"{split}.source").read_text().splitlines())
    (data / f"{split}.source").write_text(("a " * 8 + "\n") * count)
    model = Model(width=8, hidden=8, depth=1, heads=2, max_length=8)
    run = G2PRun(name="x", data=str(data), model=model, steps=1, record_every=0, threads=1)
    with pytest.raises(ValueError, match=rf"the {split} split .*max_length=8"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_trained_model_is_not_scored_on_data_with_other_words(tmp_path):
    model = Model(width=16, hidden=16, depth=1, heads=2, norm="un")
    run = G2PRun(name="toy", data=str(write_pairs(tmp_path)), model=model, steps=1)
    words = reader(run.data)().vocabularies
    loaded = Loaded(run, build_model(run.task, run.model, words), words)
    (tmp_path / "train.source").write_text((tmp_path / "train.source").read_text().replace("a", "z"))
    with pytest.raises(ValueError, match="source words"):
        open_task(loaded)
