"""Layers whose weights are computed: by weight norm, spectral norm, pruning and FixNorm."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing import assert_close

import normkit as nk
from normkit.fold import fold
from normkit.models import calibrate, convert
from normkit.models.take_apart import plain_weights


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("change", ["weight_norm", "pruning", "pruning in a trained model"])
def test_weights_computed_before_forward_fold(change):
    """PyTorch refuses to copy such a model until it has run without gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    if change == "weight_norm":
        nn.utils.weight_norm(model[0])
    else:
        prune.l1_unstructured(model[0], "weight", 0.5)
    if change == "pruning in a trained model":
        model(x).sum().backward()
    assert_close(convert(model, "layer")(x), model(x))
    trained = convert(model, "un(warmup=1, window=1)")
    trained(x).sum().backward()
    calibrated = calibrate(trained, [x]).eval()
    folded, _ = fold(calibrated, x)
    assert_close(folded(x), calibrated(x), rtol=1e-4, atol=1e-5)
    assert {name for name, _ in trained.named_parameters()} == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("normalize", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_norms_fold_into_layers_with_normalized_weights(normalize):
    torch.manual_seed(0)
    layers = [normalize(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), nn.ReLU(), normalize(nn.Conv2d(4, 2, 1)), nn.Flatten()]
    original = nn.Sequential(*layers, normalize(nn.Linear(18, 5, bias=False)), nn.BatchNorm1d(5), nn.Linear(5, 2))
    model, size = nk.convert(original, "batch").train(), (8, 3, 5, 5)
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
