"""Language models that carry state, against formulas; dropout, resumed runs."""

import dataclasses
import math

import pytest
import torch
from corpus_files import write_text
from norm_cases import reads_its_sample, short
from normkit_papers.models.config import Model
from normkit_papers.models.lm import LSTMLM, DecoderLM, WeightDropLSTM
from normkit_papers.models.mixers import RelativeAttention
from normkit_papers.train import language
from normkit_papers.train.config import LanguageRun
from normkit_papers.train.run import train
from test_resume import everything, killed_at, same

from normkit.norms import NORMS, Norm

XL = Model(width=12, hidden=20, depth=2, heads=2, attention="relative", memory=4, test_memory=40, placement="post")
LSTM = Model(arch="lstm", width=8, hidden=12, last_hidden=10, depth=3, experts=3, weight_drop=0.5, dropout=0.2,
             hidden_dropout=0.2)  # fmt: skip
TIED = Model(arch="lstm", width=8, hidden=12, depth=2)
RUN = LanguageRun(
    name="text", data="pydoc", context=5, model=XL, steps=24, batch_tokens=20, valid_every=6,
    checkpoint_every=5, record_every=4, warmup=2, threads=1, label_smoothing=0.0,
)  # fmt: skip


def random(module):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.5)
    return module.double().eval()


def texts(*shape, vocab=11):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(1))


def in_segments(model, tokens, sizes):
    cache = {}
    return torch.cat([model(segment, cache) for segment in tokens.split(sizes, 1)], 1)


# -- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [XL, dataclasses.replace(XL, placement="pre"), TIED, LSTM])
def test_segments_with_carried_state_equal_the_whole_text(config):
    model = random(LSTMLM(config, 11) if config.arch else DecoderLM(config, 11))
    tokens = texts(3, 17)
    torch.testing.assert_close(in_segments(model, tokens, [5, 1, 7, 4]), model(tokens))
    fresh = torch.cat([model(segment) for segment in tokens.split([5, 12], 1)], 1)
    assert (fresh[:, 5:] - model(tokens)[:, 5:]).abs().max() > 1e-3, "the state counts"


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("spec", [s for s in map(short, NORMS) if not (s.startswith("group") or reads_its_sample(s))])
def test_norms_in_transformer_xl_measure_each_word_once(spec, placement):
    """No norm gets a remembered word again, and at inference segments equal the whole text."""
    model = DecoderLM(dataclasses.replace(XL, norm=spec, placement=placement), 11)
    sizes = []
    for norm in [module for module in model.modules() if isinstance(module, Norm)]:
        norm.register_forward_pre_hook(lambda _, args: sizes.append(args[0].shape[:-1]))
    cache = {}
    for segment in texts(3, 20).split(5, 1):
        model(segment, cache).square().mean().backward()
    assert set(sizes) == {(3, 5)}
    model = model.double().eval()
    tokens = texts(2, 12)
    torch.testing.assert_close(in_segments(model, tokens, 5), model(tokens))


def test_relative_attention_is_its_formula():
    block = random(RelativeAttention(6, 2, 0.0))
    x, past = torch.randn(2, 2, 4, 6, dtype=torch.float64)
    past = past[:, :3]
    seen = torch.cat([past, x], 1)
    heads = []
    for h in (slice(0, 3), slice(3, 6)):
        content, place = block.content_bias[h.start // 3, 0], block.place_bias[h.start // 3, 0]
        out = torch.zeros(2, 4, 3, dtype=torch.float64)
        for b in range(2):
            for i in range(4):
                query = (block.query.weight @ x[b, i])[h]
                scores = []
                for j in range(3 + i + 1):
                    angles = [(3 + i - j) * 10_000 ** (-c / 6) for c in (0, 2, 4)]
                    r = torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)
                    key = (block.key.weight @ seen[b, j])[h]
                    scores.append(((query + content) @ key + (query + place) @ (block.place.weight @ r)[h]) / 3**0.5)
                weights = torch.stack(scores).softmax(0)
                out[b, i] = weights @ (seen[b, : 3 + i + 1] @ block.value.weight.T)[:, h]
        heads.append(out)
    torch.testing.assert_close(block(x, seen), torch.cat(heads, -1) @ block.out.weight.T, rtol=1e-5, atol=1e-6)


def test_weight_drop_drops_recurrent_weights_in_training_alone():
    torch.manual_seed(0)
    layer, x = WeightDropLSTM(4, 6, 0.5).double(), torch.randn(2, 7, 4, dtype=torch.float64)
    plain = torch.nn.LSTM(4, 6, batch_first=True).double()
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer.eval()(x)[0], plain(x)[0])
    torch.manual_seed(1)
    dropped = layer.train()(x)[0]
    torch.testing.assert_close(dropped[:, 0], plain(x)[0][:, 0])  # without a state, recurrent weights do not count
    torch.manual_seed(1)
    with torch.no_grad():
        plain.weight_hh_l0.copy_(torch.nn.functional.dropout(layer.weight_hh_l0, 0.5))
    torch.testing.assert_close(dropped, plain(x)[0])
    dropped.square().sum().backward()
    assert ((layer.weight_hh_l0.grad == 0) == (plain.weight_hh_l0 == 0)).all()


# -- training ---------------------------------------------------------------------------------------------------------


def test_streams_are_contiguous_and_score_each_word_once():
    text = torch.arange(32)
    batches = language._streams(text, length=4, rows=3)
    assert [batch.fresh for batch in batches] == [True, False, False]
    given, target = (torch.cat([batch.tensors[at] for batch in batches], 1) for at in (0, 1))
    assert given.tolist() == [list(range(10 * row, 10 * row + 10)) for row in range(3)]
    assert torch.equal(target, given + 1)
    assert sum(batch.tokens for batch in language._streams(text, 4, 1)) == 31


def test_words_before_a_piece_are_read_and_not_scored():
    batches = language._all_pieces(torch.arange(31), length=4, before=6)
    targets = torch.cat([batch.tensors[1].flatten() for batch in batches])
    assert sorted(targets.tolist()) == list(range(1, 31))
    for batch in batches:
        given, target = batch.tensors
        assert given.shape[1] - target.shape[1] == min(6, int(target[0, 0]) - 1)
        assert torch.equal(given[:, -1] + 1, target[:, -1])


@pytest.mark.parametrize(
    "changes",
    [
        {"model": dataclasses.replace(XL, norm="un(warmup=9)", dropout=0.1)},
        {"model": LSTM, "record_every": 0, "optimizer": "sgd", "lr": 3.0, "average": 2, "checkpoint_every": 4},
    ],
)
def test_a_resumed_run_continues_its_streams_and_averages(changes, tmp_path):
    run = dataclasses.replace(RUN, data=str(write_text(tmp_path / "text")), **changes)
    assert train(run, tmp_path / "whole")["status"] == "done"
    same(killed_at(run, tmp_path / "killed", 18), everything(tmp_path / "whole"))


def test_evaluation_starts_without_state_and_leaves_that_of_training(monkeypatch):
    task = language.Language(RUN, random(DecoderLM(XL, 11)).float(), None)
    batches = language._streams(texts(60), 5, 2)
    first = task.mean_loss(batches)
    task.loss(batches[3])
    state = task.carried[task.model]["1"][0]
    assert task.mean_loss(batches) == first
    assert task.carried[task.model]["1"][0] is state
    whole = task.mean_loss(language._streams(texts(60), 30, 2))
    assert first == pytest.approx(whole, rel=1e-5)
