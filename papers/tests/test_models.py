"""Our own Transformers: masks, causality, caches, norms by place, initial weights."""

import dataclasses

import numpy as np
import pytest
import torch
from norm_cases import reads_its_sample, short
from normkit_papers.data.vocab import PAD
from normkit_papers.models.blocks import Adaptive
from normkit_papers.models.config import Model
from normkit_papers.models.lm import DecoderLM
from normkit_papers.models.mixers import Convolution, MultiLinear
from normkit_papers.models.mt import Seq2Seq
from torch.testing import assert_close

from normkit.norms import NORMS, Norm

SMALL = Model(width=16, hidden=32, depth=2, heads=2)
SOURCE = torch.tensor([[4, 5, 6, 7, 2], [8, 9, 2, 0, 0]])
TARGET = torch.tensor([[1, 5, 6, 7], [1, 9, 0, 0]])
CONVOLUTIONS = [
    dataclasses.replace(SMALL, attention="dynamicconv", kernels=(3, 5), norm="un(window=2, warmup=2)"),
    dataclasses.replace(SMALL, attention="dynamicconv", kernels=(7,)),
]
FORMS = [
    SMALL, dataclasses.replace(SMALL, placement="post"), dataclasses.replace(SMALL, fixnorm=True, norm="scale"),
    *CONVOLUTIONS,
]  # fmt: skip
CACHED = [
    *(dataclasses.replace(SMALL, norm=spec, placement=placement)
      for spec in map(short, NORMS) for placement in ("pre", "post") if not reads_its_sample(spec)),
    *CONVOLUTIONS,
]  # fmt: skip


def seq2seq(config: Model = SMALL, seed: int = 0) -> Seq2Seq:
    """A model whose norms have lived a little and have parameters that are not 0 and 1."""
    torch.manual_seed(seed)
    model = Seq2Seq(config, 10, 10)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Norm):
                for parameter in module.parameters(recurse=False):
                    parameter.add_(torch.rand_like(parameter) * 0.5)
        for _ in range(3):
            model(SOURCE, TARGET)
    return model.eval()


def drawn(block):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    return block.double()


@pytest.mark.parametrize("config", FORMS)
def test_padding_changes_nothing(config):
    model = seq2seq(config)
    want = model(SOURCE, TARGET)
    padded = model(torch.nn.functional.pad(SOURCE, (0, 3)), torch.nn.functional.pad(TARGET, (0, 2)))
    assert_close(padded[:, :4][TARGET != PAD], want[TARGET != PAD])
    alone = model(SOURCE[1:, :3], TARGET[1:, :2])
    assert_close(alone[0], want[1, :2])


@pytest.mark.parametrize("spec", [short(name) for name in NORMS])
def test_padding_changes_no_statistics_while_training(spec):
    one, two = (seq2seq(dataclasses.replace(SMALL, norm=spec)).train() for _ in range(2))
    a = one(SOURCE, TARGET)
    b = two(torch.nn.functional.pad(SOURCE, (0, 3)), torch.nn.functional.pad(TARGET, (0, 2)))
    if not reads_its_sample(spec):
        assert_close(b[:, :4][TARGET != PAD], a[TARGET != PAD], rtol=1e-4, atol=1e-5)
    for (name, buffer), other in zip(one.named_buffers(), two.buffers(), strict=True):
        assert_close(other, buffer, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("config", CACHED, ids=lambda config: f"{config.norm}-{config.placement}-{config.attention}")
def test_decoding_in_pieces_equals_decoding_at_once(config):
    model = seq2seq(config).double()  # some norms amplify
    memory, real = model.encode(SOURCE)
    whole = model.decode(TARGET, memory, real)
    for pieces in ((1, 1, 1, 1), (2, 1, 1), (1, 3)):
        cache, start, got = {}, 0, []
        for size in pieces:
            got.append(model.decode(TARGET[:, start : start + size], memory, real, cache, start))
            start += size
        assert_close(torch.cat(got, 1)[TARGET != PAD], whole[TARGET != PAD])


def test_dynamic_convolution_agrees_with_a_loop_over_positions():
    torch.manual_seed(0)
    block, x = Convolution(4, 2, 3, 0.0), torch.randn(1, 5, 4)
    gated = torch.nn.functional.glu(block.inner(x), -1)[0]
    weights = block.taps(gated).view(5, 2, 3).softmax(-1)
    for causal, shift in ((True, 2), (False, 1)):
        want = torch.zeros(5, 4)
        for t in range(5):
            for channel in range(4):
                for k in range(3):
                    if 0 <= t + k - shift < 5:
                        want[t, channel] += weights[t, channel // 2, k] * gated[t + k - shift, channel]
        assert_close(block(x, causal=causal)[0][0], block.outer(want))


def test_norms_by_place():
    rules = {"encoder.layers.0.*": "un", "*.final_norm": "rms", "decoder.*": "scale"}
    model = Seq2Seq(dataclasses.replace(SMALL, norm="power", norm_at=rules), 10, 10)
    kinds = [type(module).__name__ for module in model.modules() if isinstance(module, Norm)]
    encoder, decoder = ["UN", "UN", "PowerNorm", "PowerNorm", "RMSNorm"], [*["ScaleNorm"] * 6, "RMSNorm"]
    assert kinds == [*encoder, *decoder]
    with pytest.raises(ValueError, match="norm"):
        Seq2Seq(dataclasses.replace(SMALL, norm_at={"encodr.*": "un"}), 10, 10)


def test_embeddings_tied_shared_and_fixed():
    free = Seq2Seq(dataclasses.replace(SMALL, tie=False), 10, 12)
    tied = Seq2Seq(SMALL, 10, 12)
    shared = Seq2Seq(dataclasses.replace(SMALL, share=True), 12, 12)

    def count(model):
        return sum(p.numel() for p in model.parameters())

    assert count(free) - count(tied) == 12 * 16
    assert count(tied) - count(shared) == 10 * 16
    with pytest.raises(ValueError, match="10 source and 12 target"):
        Seq2Seq(dataclasses.replace(SMALL, share=True), 10, 12)
    fixed = Seq2Seq(dataclasses.replace(SMALL, fixnorm=True), 10, 12)
    rows = fixed.target_embedding.table.weight.norm(dim=1)
    assert_close(rows[1:], torch.ones(11))
    assert float(rows[PAD].detach()) == 0
    assert float(fixed.target_embedding.table.parametrizations.weight.original.detach().abs().max()) <= 0.01


MULTI = Model(
    width=12, hidden=20, depth=2, heads=1, attention="multilinear", rank=5, placement="post", max_length=8, tie=True
)


LANGUAGE = [
    *(dataclasses.replace(SMALL, norm=spec) for spec in ("layer", "un(window=2, warmup=2)", "power(groups=0)")),
    dataclasses.replace(SMALL, attention="rotary"), MULTI,
]  # fmt: skip


@pytest.mark.parametrize("config", LANGUAGE)
def test_language_models_are_causal_and_cache(config):
    model = drawn(DecoderLM(config, 11))
    tokens = torch.randint(4, 11, (3, 8), generator=torch.Generator().manual_seed(1))
    model(tokens)
    whole = model.eval()(tokens)
    for place in range(1, 8):
        other = tokens.clone()
        other[:, place:] = torch.randint(4, 11, (3, 8 - place), generator=torch.Generator().manual_seed(place))
        assert_close(model(other)[:, :place], whole[:, :place], rtol=0, atol=1e-9)
        assert (model(other)[:, place:] - whole[:, place:]).abs().max() > 1e-3
    if config is not MULTI:
        cache = {}
        assert_close(torch.cat([model(tokens[:, i : i + 2], cache, i) for i in (0, 2, 4, 6)], 1), whole)


# -- initial weights, dropped layers and words ---------------------------------------------------------------------

DEEP = Model(width=64, hidden=128, depth=4, heads=4)


XAVIER, WIDER = (2 / 128) ** 0.5, (2 / 192) ** 0.5  # of the attention, and of the feed-forward blocks


@pytest.mark.parametrize(
    ("how", "stack", "block", "weight", "expected"),
    [("small", "encoder", "attention", "query", [(2 / 320) ** 0.5] * 4),
     ("small", "encoder", "feedforward", "inner", [WIDER] * 4),
     ("ds", "encoder", "attention", "query", [XAVIER / number**0.5 for number in (1, 2, 3, 4)]),
     ("ds", "decoder", "cross", "out", [XAVIER / number**0.5 for number in (1, 2, 3, 4)]),
     ("ds", "decoder", "feedforward", "inner", [WIDER / number**0.5 for number in (1, 2, 3, 4)]),
     ("fixup", "encoder", "attention", "value", [XAVIER * 8**-0.5] * 4),
     ("fixup", "decoder", "feedforward", "inner", [WIDER * 12**-0.5] * 4),
     ("fixup", "decoder", "cross", "out", [0.0] * 4), ("fixup", "encoder", "feedforward", "outer", [0.0] * 4)],
)  # fmt: skip
def test_initial_weights_depend_on_width_and_depth(how, stack, block, weight, expected):
    torch.manual_seed(0)
    layers = getattr(Seq2Seq(dataclasses.replace(DEEP, init=how), 100, 100), stack).layers
    found = [float(getattr(getattr(layer, block), weight).weight.detach().std()) for layer in layers]
    assert found == pytest.approx(expected, rel=0.05)


def test_layer_drop_has_the_given_rate_in_training_only():
    model = DecoderLM(dataclasses.replace(DEEP, layer_drop=0.25, depth=8), 50)
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


# -- multi-linear attention, adaptive embeddings -------------------------------------------------------------------


def test_multi_linear_attention_is_its_formula():
    block = drawn(MultiLinear(6, 4, 7, 0.0))
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    numbers = {name: value.detach().numpy() for name, value in block.named_parameters()}
    expected = np.zeros((2, 5, 6))
    place = block.positions.numpy() @ numbers["place.weight"].T
    for b, row in enumerate(x.numpy()):
        query, key, value = (row @ numbers[f"{name}.weight"].T for name in ("query", "key", "value"))
        for i in range(5):
            for j in range(i + 1):
                for k in range(i + 1):
                    left = (query[i] + numbers["key_bias"]) * key[j] + (query[i] + numbers["place_bias"]) * place[j]
                    expected[b, i] += (numbers["core"] * left * value[k]).sum() * numbers["out"][j, k]
    np.testing.assert_allclose(block(x).detach().numpy(), expected, rtol=1e-10)


def test_adaptive_losses_are_those_of_all_probabilities():
    layer = drawn(Adaptive(20, 16, (6, 11)))
    x, target = torch.randn(2, 20, 16, dtype=torch.float64), torch.arange(40).view(2, 20) % 20
    whole = layer.scores(x)
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(2, 20, dtype=torch.float64))
    torch.testing.assert_close(layer.nll(x, target), -whole.gather(2, target[..., None]).mean())
    torch.testing.assert_close(whole[..., 6:11].exp().sum(-1), (x @ layer.head.weight.T).softmax(-1)[..., 6])
    vectors = layer.embed(torch.tensor([5, 6, 19]))
    for vector, (project, narrow), row in zip(vectors[1:], layer.tail, (0, 8), strict=True):
        torch.testing.assert_close(vector, project.weight.T @ narrow.weight[row])
    torch.testing.assert_close(vectors[0], layer.head.weight[5])
