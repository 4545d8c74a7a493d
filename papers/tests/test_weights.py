"""Weight and spectral normalization: where they start, what they keep, how they fold."""

import copy

import pytest
import torch
from normkit_papers.models.config import Model
from normkit_papers.train.config import Run
from normkit_papers.train.folder import load
from normkit_papers.train.run import train
from torch import nn
from torch.testing import assert_close

import normkit
from normkit.norms import fix_embedding, fold_weights, spectral_norm, weight_norm


def network(*middle):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.Linear(8, 5, bias=False), nn.Linear(5, 4))


def test_weight_norm_starts_with_outputs_of_mean_0_and_variance_1():
    model, x = network(nn.ReLU()), 3 + torch.randn(200, 6)
    plain = model(x)
    assert_close(weight_norm(network(nn.ReLU()))(x), plain)  # without a start nothing changes
    weight_norm(model, lambda: model(x))
    assert model.training
    first, second = model[0](x), model[2](model[1](model[0](x)))
    assert_close(first.mean(0), torch.zeros(8), atol=1e-5, rtol=0)
    assert_close(first.std(0, correction=0), torch.ones(8))
    assert_close(second.std(0, correction=0), torch.ones(5))  # without a bias the mean stays
    length = model[0].parametrizations.weight.original0
    assert_close(model[0].weight.norm(dim=1, keepdim=True), length)


def test_weight_norm_of_a_convolution_starts_the_same_way():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(5, 3, 8, 8) * 2 + 1
    y = weight_norm(model, lambda: model(x))(x)
    assert_close(y.mean((0, 2, 3)), torch.zeros(4), atol=1e-5, rtol=0)
    assert_close(y.std((0, 2, 3), correction=0), torch.ones(4))


def test_spectral_norm_bounds_every_layer_and_is_frozen_at_inference():
    model = spectral_norm(network())
    for _ in range(30):
        model(torch.randn(2, 6))
    for layer in model:
        assert_close(torch.linalg.matrix_norm(layer.weight, 2), torch.tensor(1.0), atol=1e-3, rtol=0)
    model.eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model(torch.randn(2, 6))
    assert_close(model.state_dict(), state, rtol=0, atol=0)


@pytest.mark.parametrize("change", [weight_norm, spectral_norm])
def test_norms_fold_into_layers_with_normalized_weights(change):
    model = change(network(normkit.make("batch", 8), nn.ReLU(), normkit.make("batch", 8)), layers="[04]")
    for _ in range(5):
        model(torch.randn(50, 6))
    x = torch.randn(7, 6)
    folded, report = normkit.fold(model.eval(), x)
    assert {row.action for row in report.rows} <= {"folded", "folded back"}
    assert not any("parametrizations" in name for name in folded.state_dict())
    assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    assert_close(fold_weights(model)(x), folded(x), rtol=1e-4, atol=1e-5)


def test_shared_weights_stay_and_a_pattern_without_layers_is_an_error():
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "output": nn.Linear(4, 5), "free": nn.Linear(4, 4)})
    model["output"].weight = model["table"].weight
    weight_norm(model)
    assert model["output"].weight is model["table"].weight
    assert "weight" in model["free"].parametrizations
    with pytest.raises(ValueError, match=r"no Linear or convolution layer .* called encoder"):
        spectral_norm(model, layers="encoder*")


def test_weights_without_a_direction_are_an_error():
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight[0] = 0
    assert spectral_norm(nn.Sequential(nn.Linear(3, 2))[:1])
    with pytest.raises(ValueError, match="0 has 1 output channels of zeros"):
        weight_norm(nn.Sequential(layer))
    nn.init.zeros_(layer.weight)
    with pytest.raises(ValueError, match="0 has 2 output channels of zeros"):
        spectral_norm(nn.Sequential(layer))


def test_a_matrix_that_two_modules_share_stays_shared():
    table, output = normkit.fix_embedding(nn.Embedding(9, 4)), nn.Linear(4, 9, bias=False)
    nn.utils.parametrize.register_parametrization(output, "weight", normkit.FixNorm())
    output.parametrizations.weight.original = table.parametrizations.weight.original
    plain = fold_weights(nn.Sequential(table, output))
    assert plain[0].weight is plain[1].weight


@pytest.mark.parametrize("kind", ["weight", "spectral"])
def test_a_run_with_normalized_weights_trains_and_loads(kind, tmp_path):
    model = Model(width=16, hidden=16, depth=1, heads=2, reparametrize=kind, norm="nonorm", tie=False)
    run = Run(name="x", task="g2p", data="cmudict", model=model, steps=2, batch_tokens=100, test_items=4, threads=1)
    assert train(run, tmp_path)["status"] == "done"
    layer = load(tmp_path).model.encoder.layers[0].feedforward.inner
    if kind == "weight":  # the start gave lengths far from those of the draw
        assert layer.parametrizations.weight.original0.std() > 0.02
    else:
        assert torch.linalg.matrix_norm(layer.weight, 2).item() == pytest.approx(1, abs=0.05)


class Called(nn.Module):
    """A layer called by keyword, and a convolution without a batch."""

    def __init__(self):
        super().__init__()
        self.linear, self.convolution = nn.Linear(4, 3), nn.Conv1d(2, 3, 3)

    def forward(self, x, z):
        return self.linear(input=x), self.convolution(z)


def test_the_start_of_layers_in_other_calls():
    model, given = Called(), (torch.randn(50, 4), torch.randn(2, 30))
    weight_norm(model, lambda: model(*given))
    for y, axis in zip(model(*given), (0, 1), strict=True):
        torch.testing.assert_close(y.std(axis, correction=0), torch.ones(3), rtol=1e-3, atol=1e-3)


def test_an_error_at_the_start_leaves_the_layers_as_they_were():
    model = Called()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="expected input"):
        weight_norm(model, lambda: model(torch.randn(50, 4), torch.randn(7, 30)))
    assert type(model.linear) is nn.Linear
    torch.testing.assert_close(dict(model.state_dict()), dict(before))


@pytest.mark.parametrize("options", [{"sparse": True}, {"max_norm": 0.5}])
def test_fixnorm_refuses_what_it_would_break(options):
    with pytest.raises(ValueError, match="no sparse=True, no max_norm"):
        fix_embedding(nn.Embedding(5, 4, **options))
