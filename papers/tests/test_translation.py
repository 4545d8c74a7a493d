"""Sequence-to-sequence tasks: BLEU and error rates, runs, stopping rules, several processes."""

import dataclasses
import json

import pytest
import torch
from corpus_files import cache_with_kernels, write_corpus
from forked import two_ranks
from normkit_papers.data.corpora import locate
from normkit_papers.data.prepare import prepare
from normkit_papers.data.vocab import PAD, Subwords
from normkit_papers.models.config import Model
from normkit_papers.models.mt import Seq2Seq
from normkit_papers.recipes import RECIPES
from normkit_papers.train.config import TranslationRun
from normkit_papers.train.folder import load
from normkit_papers.train.run import train
from normkit_papers.train.scores import error_rates
from normkit_papers.train.translation import MachineTranslation
from test_resume import checkpoint_path

TINY = Model(width=16, hidden=24, depth=1, heads=2, share=True)
RUN = TranslationRun(
    name="made", data="", model=TINY, steps=20, batch_tokens=200, lr=1e-2, warmup=3, valid_every=10,
    checkpoint_every=10, subwords=60, record_every=0, threads=1,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    patch, folder = pytest.MonkeyPatch(), tmp_path_factory.mktemp("made")
    patch.setenv("NORMKIT_CACHE", str(cache_with_kernels(folder / "cache")))
    yield write_corpus(folder / "corpus")
    patch.undo()


def changed(corpus, **changes):
    return dataclasses.replace(RUN, data=str(corpus), **changes)


def edits(a, b):
    """Levenshtein distance, the slow way."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        row, old = [i], row
        for j, y in enumerate(b, 1):
            row.append(min(old[j] + 1, row[-1] + 1, old[j - 1] + (x != y)))
    return row[-1]


def test_error_rates_are_those_of_the_closest_reference():
    generator = torch.Generator().manual_seed(0)

    def word(least):
        size = int(torch.randint(least, 7, (), generator=generator))
        return ["ABC"[k] for k in torch.randint(3, (size,), generator=generator).tolist()]

    hypotheses = [word(0) for _ in range(200)]
    references = [[word(1) for _ in range(1 + k % 3)] for k in range(200)]
    score = error_rates(hypotheses, references)
    best = [
        min((edits(hypothesis, variant), -len(variant)) for variant in variants)
        for hypothesis, variants in zip(hypotheses, references, strict=True)
    ]
    assert score["per"] == pytest.approx(100 * sum(e for e, _ in best) / -sum(n for _, n in best))
    assert score["wer"] == pytest.approx(100 * sum(e > 0 for e, _ in best) / 200)
    assert score["n"] == 200


@pytest.mark.parametrize("norm", ["layer", "un(warmup=4)"])
def test_a_run_on_a_made_corpus(corpus, tmp_path, norm):
    model = dataclasses.replace(TINY, norm=norm, mask_logits=True, word_dropout=0.1, dropout=0.1)
    result = train(changed(corpus, model=model, test_items=20, valid_bleu=True), tmp_path)
    assert result["status"] == "done"
    assert set(result["scores"]) == {"running", "beam"} | ({"calibrated"} if norm != "layer" else set())
    assert all({"bleu", "bleu_error", "sacrebleu", "n"} <= set(score) for score in result["scores"].values())
    assert all(score["n"] == 20 for score in result["scores"].values())
    assert result["data"]["splits"]["train"]["lines"] == 300
    assert [set(each) for each in result["valid"]] == [{"step", "loss", "bleu"}] * 2
    assert len((tmp_path / "outputs" / "beam.txt").read_text().splitlines()) == 20
    _, model, vocabularies = load(tmp_path)
    assert isinstance(vocabularies["target"], Subwords)
    assert model.allowed.sum() < len(model.allowed)
    assert model(torch.tensor([[5, 2]]), torch.tensor([[1, 5]])).max() > -100


def test_only_target_words_are_generated(corpus):
    data = prepare(locate(str(corpus)), subwords=60, share=True)
    config = dataclasses.replace(TINY, mask_logits=True)
    torch.manual_seed(0)
    model = Seq2Seq(config, 60, 60)
    run = changed(corpus, model=config, label_smoothing=0.1)
    task = MachineTranslation(run, model, data)
    known = set(data.train.target.flat.tolist())
    scores = model(torch.tensor([[5, 2]]), torch.tensor([[1]]))[0, 0]
    for word, score in enumerate(scores.tolist()):
        assert (score > -1e8) == (word in known)
    batch = next(task.batches(0))
    source, given, target = batch.tensors
    log_p = model(source, given).log_softmax(-1)[target != PAD]
    exact = torch.stack([row[word] for row, word in zip(log_p, target[target != PAD], strict=True)]).mean()
    even = log_p[:, sorted(known)].mean()
    torch.testing.assert_close(task.loss(batch, 0.1), -(0.9 * exact + 0.1 * even))
    never = next(word for word in range(4, 60) if word not in known)
    odd = target.clone()
    odd[0, 0] = never  # as a word of the validation split may be
    for smoothing in (0.0, 0.1):
        without = batch._replace(tensors=(source, given, odd.where(odd != never, PAD)))
        found = task.loss(batch._replace(tensors=(source, given, odd)), smoothing)
        assert float(found.detach()) < 100
        torch.testing.assert_close(found, task.loss(without, smoothing))


def test_long_pairs_are_dropped_in_training_and_raise_in_test(corpus, tmp_path):
    folder = write_corpus(tmp_path / "long")
    for side in ("source", "target"):
        with (folder / f"train.{side}").open("a", encoding="utf8") as file:
            file.write("ka " * 60 + "\n" if side == "source" else "one " * 60 + "\n")
    config = dataclasses.replace(TINY, max_length=40)
    data = prepare(locate(str(folder)), subwords=60, share=True)
    task = MachineTranslation(changed(folder, model=config), Seq2Seq(config, 60, 60), data)
    assert task.describe_data()["left_out"] == 1
    assert max(max(tensor.shape[1] for tensor in next(task.batches(0)).tensors) for _ in range(3)) <= 40
    config = dataclasses.replace(TINY, max_length=6)
    with pytest.raises(ValueError, match="max_length=6"):
        MachineTranslation(changed(folder, model=config), Seq2Seq(config, 60, 60), data)


def test_training_stops_after_validations_without_improvement(corpus, tmp_path, monkeypatch):
    losses = iter([3.0, 2.0, 2.5, 2.4, 2.3, 9.0])
    monkeypatch.setattr(MachineTranslation, "validate", lambda task: {"loss": next(losses)})
    run = changed(corpus, steps=50, valid_every=4, checkpoint_every=4, patience=3, average=2, average_of="best", keep=2)
    result = train(dataclasses.replace(run, test_items=5), tmp_path)
    assert result["status"] == "done"
    assert [each["step"] for each in result["valid"]] == [4, 8, 12, 16, 20]
    assert result["curve"][-1]["step"] == 20
    kept = [int(path.stem[5:]) for path in sorted((tmp_path / "best").iterdir())]
    assert kept == [8, 20], "of equal ones the first"
    assert result["averaged"] == 2


def test_training_stops_below_a_learning_rate(corpus, tmp_path):
    run = changed(corpus, steps=60, schedule="inverse_sqrt", warmup=4, lr=1e-2, stop_lr=0.5e-2, valid_every=0)
    result = train(dataclasses.replace(run, checkpoint_every=0, test_items=5), tmp_path)
    assert 15 <= result["curve"][-1]["step"] <= 17  # 1e-2 sqrt(4 / n) < 0.5e-2 for n > 16


@pytest.mark.parametrize("allowed", [range(2, 60), range(2, 30)])
def test_validation_loss_counts_every_symbol_once(allowed, corpus):
    data, config = prepare(locate(str(corpus)), subwords=60, share=True), dataclasses.replace(TINY, mask_logits=True)
    torch.manual_seed(0)
    task = MachineTranslation(changed(corpus, model=config, batch_tokens=90), Seq2Seq(config, 60, 60), data)
    task.model.allow(allowed)
    assert len(batches := task.validation_batches()) > 2
    assert all(sum(int((t != PAD).sum()) for t in (b.tensors[0], b.tensors[2])) <= 90 or b.words == 1 for b in batches)
    one_by_one = [data.valid.batch([item]) for item in range(len(data.valid))]
    assert sum(batch.tokens for batch in batches) == sum(batch.tokens for batch in one_by_one)
    assert task.mean_loss(batches) == pytest.approx(task.mean_loss(one_by_one), rel=1e-5)


def test_validation_uses_valid_items_and_bleu_all_sentences(corpus, monkeypatch):
    data = prepare(locate(str(corpus)), subwords=60, share=True)
    torch.manual_seed(0)
    for limit, items in ((500, 20), (0, 20), (7, 7)):
        task = MachineTranslation(changed(corpus, valid_items=limit, valid_bleu=True), Seq2Seq(TINY, 60, 60), data)
        assert sum(len(batch.tensors[0]) for batch in task.validation_batches()) == items
        seen = []
        monkeypatch.setattr(
            "normkit_papers.train.translation.bleu", lambda found, *_, **__: seen.extend(found) or {"bleu": 1.0}
        )
        for training in (True, False):  # a calibrated model was returned in training mode
            task.model.train(training)
            assert task.validate()["bleu"] == 1
            assert task.model.training == training
        assert len(seen) == 2 * 20
    papers = [name for name, recipe in RECIPES.items() if recipe().task == "mt" and recipe().patience]
    assert len(papers) == 5
    assert all(RECIPES[name]().valid_items == 0 for name in papers), "stopping early rests on it"


def in_two_processes(run, folder):
    """Train the rest of a run, started as torchrun does; its result and weights."""
    program = (
        "from normkit_papers.train.config import Run; from normkit_papers.train.run import train\n"
        f"train(Run.from_json({run.to_json()!r}), {str(folder)!r}, resume=True)\n"
    )
    two_ranks(program)
    return json.loads((folder / "result.json").read_text()), (folder / "model.safetensors").read_bytes()


@pytest.mark.slow
def test_two_processes_train_one_model(corpus, tmp_path):
    """Replicated, with synchronised statistics, and resumed to the same weights."""
    model = dataclasses.replace(TINY, norm="un(sync=True, warmup=4)", word_dropout=0.2)  # draws a number a word
    run = changed(corpus, model=model, devices=2, device="cpu", steps=6, valid_every=3, checkpoint_every=3,
                  record_every=2, test_items=5)  # fmt: skip
    result, weights = in_two_processes(run, tmp_path)
    assert result["status"] == "done"
    assert result["scores"]["beam"]["n"] == 5
    assert int(load(tmp_path).model.encoder.final_norm.step) == 6
    assert [each["step"] for each in result["valid"]] == [3, 6]
    checkpoint_path(tmp_path, 6).unlink()
    again, same = in_two_processes(run, tmp_path)
    assert again["curve"] == result["curve"], "each process goes on with its own chance"
    assert same == weights
