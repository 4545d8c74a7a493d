"""Layers whose weights have PyTorch's parametrizations convert, train and fold."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.testing import assert_close

import normkit as nk
from normkit.models.take_apart import plain_weights


def network(normalize):
    torch.manual_seed(0)
    layers = [normalize(nn.Linear(6, 8)), nn.LayerNorm(8), nn.ReLU(), normalize(nn.Linear(8, 5, bias=False))]
    return nn.Sequential(*layers, nn.BatchNorm1d(5), normalize(nn.Linear(5, 4)))


def picture(normalize):
    torch.manual_seed(0)
    return nn.Sequential(normalize(nn.Conv2d(3, 6, 3)), nn.BatchNorm2d(6), nn.ReLU(), normalize(nn.Conv2d(6, 4, 1)))


@pytest.mark.parametrize("normalize", [parametrizations.weight_norm, parametrizations.spectral_norm])
@pytest.mark.parametrize(("build", "size"), [(network, (50, 6)), (picture, (8, 3, 5, 5))])
def test_norms_fold_into_layers_with_normalized_weights(normalize, build, size):
    original = build(normalize)
    model = nk.convert(original, "batch").train()
    for _ in range(5):
        model(torch.randn(size)).square().mean().backward()
    assert all(parameter.grad.any() for parameter in model[0].parametrizations.parameters())
    model, x = nk.calibrate(model, [torch.randn(size)], like=original).eval(), torch.randn(size)
    folded, report = nk.fold(model, x)
    assert {row.action for row in report.rows} <= {"folded", "folded back"}
    assert not any("parametrizations" in name for name in folded.state_dict())
    assert parametrize.is_parametrized(model[0]), "the given model stays"
    assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_tied_output_has_the_same_rows_or_is_rejected():
    table, output = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
    with pytest.raises(ValueError, match="weight"):
        nk.fix_embedding(table, output)
    output.weight = table.weight
    with pytest.raises(ValueError, match="Linear"):
        nk.fix_embedding(table)
    assert not parametrize.is_parametrized(table)
    model = nn.Sequential(nk.fix_embedding(table, output), output)
    assert_close(output.weight.norm(dim=1), torch.ones(9))
    assert len(list(model.parameters())) == 1
    plain = plain_weights(model)
    assert plain[0].weight is plain[1].weight
    assert_close(plain[0].weight.norm(dim=1), torch.ones(9))


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 0.5}])
def test_fixnorm_rejects_embeddings_that_change_their_rows(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        nk.fix_embedding(nn.Embedding(5, 4, **options))
