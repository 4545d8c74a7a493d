"""Initial weights that shrink with depth, dropped layers, dropped words."""

import dataclasses
from typing import get_args

import pytest
import torch
from normkit_papers.models.blocks import Embedding
from normkit_papers.models.config import Init, Model
from normkit_papers.models.lm import DecoderLM
from normkit_papers.models.mt import Seq2Seq

CONFIG = Model(width=64, hidden=128, depth=4, heads=4)


def made(how):
    torch.manual_seed(0)
    return Seq2Seq(dataclasses.replace(CONFIG, init=how), 100, 100)


def stds(model, stack, block, weight):
    layers = getattr(model, stack).layers
    return [float(getattr(getattr(layer, block), weight).weight.detach().std()) for layer in layers]


def test_ds_init_shrinks_with_the_number_of_the_layer():
    for stack, block, weight in [("encoder", "attention", "query"), ("decoder", "cross", "out")]:
        expected = [(2 / 128) ** 0.5 / number**0.5 for number in (1, 2, 3, 4)]
        assert stds(made("ds"), stack, block, weight) == pytest.approx(expected, rel=0.05)
    assert stds(made("ds"), "decoder", "feedforward", "inner")[3] == pytest.approx((2 / 192) ** 0.5 / 2, rel=0.05)


def test_fixup_starts_as_the_identity():
    model = made("fixup").eval()
    x = torch.randn(2, 5, 64)
    layer = model.encoder.layers[0]
    torch.testing.assert_close(layer(x), x)
    assert stds(model, "encoder", "attention", "value")[0] == pytest.approx((2 / 128) ** 0.5 * 8**-0.5, rel=0.05)
    assert stds(model, "decoder", "feedforward", "inner")[0] == pytest.approx((2 / 192) ** 0.5 * 12**-0.5, rel=0.05)


def test_t_fixup_scales_values_outputs_and_word_vectors():
    model, plain = made("t-fixup"), made("xavier")
    encoder, decoder = 0.67 * 4**-0.25, 36**-0.25
    ours, theirs = model.encoder.layers[2].attention, plain.encoder.layers[2].attention
    torch.testing.assert_close(ours.value.weight, encoder * theirs.value.weight)
    torch.testing.assert_close(ours.query.weight, theirs.query.weight)
    ours, theirs = model.decoder.layers[1].cross, plain.decoder.layers[1].cross
    torch.testing.assert_close(ours.out.weight, decoder * theirs.out.weight)
    torch.testing.assert_close(model.target_embedding.table.weight, decoder * plain.target_embedding.table.weight)


@pytest.mark.parametrize("how", get_args(Init))
def test_every_init_can_be_trained_from(how):
    model = made(how)
    torch.manual_seed(1)
    source, target = torch.randint(4, 100, (4, 6)), torch.randint(4, 100, (4, 7))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(10):
        scores = model(source, target[:, :-1])
        loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]


def test_layer_drop_has_the_given_rate_in_training_only():
    model = DecoderLM(dataclasses.replace(CONFIG, layer_drop=0.25, depth=8), 50)
    calls = []
    for layer in model.decoder.layers:
        layer.register_forward_hook(lambda *_: calls.append(1))
    tokens = torch.randint(4, 50, (1, 3))
    torch.manual_seed(0)
    for _ in range(200):
        model(tokens)
    assert abs(len(calls) / 1600 - 0.75) < 0.04
    calls.clear()
    model.eval()(tokens)
    assert len(calls) == 8


def test_word_dropout_applies_in_training_only():
    embedding = Embedding(dataclasses.replace(CONFIG, word_dropout=0.3), 50, pad=0)
    tokens = torch.randint(0, 50, (100, 40))
    before = tokens.clone()
    torch.manual_seed(0)
    changed = (embedding(tokens) != embedding.eval()(tokens)).any(-1)
    assert torch.equal(tokens, before), "the authors' code writes into the batch"
    assert not changed[tokens < 4].any()
    assert abs(float(changed[tokens >= 4].float().mean()) - 0.3) < 0.03
