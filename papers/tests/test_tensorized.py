"""Multi-linear attention and adaptive embeddings against their formulas.

No position depends on later ones.
"""

import numpy as np
import pytest
import torch
from normkit_papers.models.adaptive import Adaptive
from normkit_papers.models.config import Model
from normkit_papers.models.lm import DecoderLM
from normkit_papers.models.tensorized import MultiLinear

CONFIG = Model(
    width=12, hidden=20, depth=2, heads=1, attention="multilinear", rank=5, placement="post", max_length=8, tie=True
)


def drawn(block):
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_()
    return block.double()


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


def test_attention_is_causal():
    model = drawn(DecoderLM(CONFIG, vocab=11)).eval()
    tokens = torch.randint(4, 11, (3, 8), generator=torch.Generator().manual_seed(1))
    scores = model(tokens)
    for place in range(1, 8):
        other = tokens.clone()
        other[:, place:] = torch.randint(4, 11, (3, 8 - place), generator=torch.Generator().manual_seed(place))
        torch.testing.assert_close(model(other)[:, :place], scores[:, :place], rtol=0, atol=1e-9)
        assert (model(other)[:, place:] - scores[:, place:]).abs().max() > 1e-3


def test_the_order_of_earlier_words_counts():
    block = drawn(MultiLinear(6, 4, 7, 0.0))
    x = torch.randn(1, 4, 6, dtype=torch.float64)
    assert (block(x[:, [1, 0, 2, 3]])[:, 3] - block(x)[:, 3]).abs().max() > 1e-3


def test_sizes_that_do_not_fit_raise():
    with pytest.raises(ValueError, match="over 7 words got 8; raise max_length"):
        MultiLinear(6, 4, 7, 0.0)(torch.zeros(1, 8, 6))
    with pytest.raises(ValueError, match="whole pieces"):
        DecoderLM(CONFIG, vocab=11)(torch.full((1, 3), 4), cache={})
    with pytest.raises(ValueError, match=r"rising numbers.*below 10 words; got \(4, 12\)"):
        Adaptive(10, 8, (4, 12))
    with pytest.raises(ValueError, match="tied to the output"):
        DecoderLM(Model(width=8, heads=2, adaptive=(4,), tie=False), vocab=11)


def test_adaptive_losses_are_those_of_all_probabilities():
    layer = drawn(Adaptive(20, 8, (6, 11)))
    x, target = torch.randn(40, 8, dtype=torch.float64), torch.arange(40) % 20
    whole = layer(x)
    torch.testing.assert_close(whole.exp().sum(-1), torch.ones(40, dtype=torch.float64))
    torch.testing.assert_close(layer.nll(x, target), -whole.gather(1, target[:, None]).mean())
    vectors = layer.embed(torch.tensor([5, 6, 19]))
    torch.testing.assert_close(vectors[1], layer.maps[0].weight @ layer.tables[1].weight[0])
    torch.testing.assert_close(vectors[2], layer.maps[1].weight @ layer.tables[2].weight[8])
    torch.testing.assert_close(vectors[0], layer.tables[0].weight[5])


def test_an_adaptive_model_counts_the_same_loss_both_ways():
    torch.manual_seed(0)
    model = DecoderLM(Model(width=16, hidden=24, depth=1, heads=2, adaptive=(6, 11)), vocab=20).eval()
    tokens, target = torch.randint(0, 20, (2, 2, 9))
    scores = model(tokens)
    loss = torch.nn.functional.cross_entropy(scores.flatten(0, 1), target.flatten())
    torch.testing.assert_close(model.nll(tokens, target), loss)
