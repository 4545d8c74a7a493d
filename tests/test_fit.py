"""Offline norms are fitted to the norms that they replaced."""

import copy

import pytest
import torch
from third_party_models import case_of, randomize
from torch import nn

from normkit.fold import fold
from normkit.models import convert, fit_norms

DIM = 6


def model_of(count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(count) for part in (nn.Linear(DIM, DIM), nn.Tanh(), nn.LayerNorm(DIM))]
    return randomize(nn.Sequential(*layers, nn.Linear(DIM, 3))).eval()


def batches(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(40, DIM, generator=generator) + 0.3 for _ in range(count)]


@pytest.mark.parametrize("spec", ["un", "batch", "un(bias=False)", "batch(bias=False)", "pnv(scalar=True)", "repbn"])
def test_gain_and_bias_are_those_of_a_least_squares_solver_one_norm_after_the_other(spec):
    original, data = model_of(), batches()
    fitted = fit_norms(convert(original, spec), original, data)
    x = torch.cat(data)
    for at in (2, 5):
        wanted, read = original[: at + 1](torch.cat(data)), fitted[:at](x)
        for channel in range(DIM):
            z = read[:, [channel]]
            if "bias=False" in spec:
                columns = z - fitted[at].running[0, channel] if fitted[at].center else z
            else:
                columns = torch.cat([z, torch.ones_like(z)], 1)
            solved = columns @ torch.linalg.lstsq(columns.double(), wanted[:, channel].double()).solution.float()
            torch.testing.assert_close(fitted[: at + 1](x)[:, channel], solved, rtol=1e-3, atol=1e-4)


def test_masks_layouts_and_encoder_decoders_are_followed_and_the_error_falls():
    case = case_of("bert")
    original = case.model.eval()
    mask = torch.ones_like(case.kwargs["input_ids"])
    mask[:, -2:] = 0
    one = {**case.kwargs, "attention_mask": mask}
    other = {**one, "input_ids": torch.where(mask.bool(), one["input_ids"], 5)}
    converted = convert(original, "un", mask_from="attention_mask")
    fitted, same = (fit_norms(converted, original, [batch]) for batch in (one, other))
    for (name, mine), theirs in zip(fitted.state_dict().items(), same.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)

    torch.manual_seed(0)
    picture = randomize(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))).eval()
    x = torch.randn(4, 3, 8, 8)
    fitted = fit_norms(convert(picture, "pnv"), picture, [x])
    torch.testing.assert_close(fitted(x), picture(x), rtol=1e-4, atol=1e-5)


def test_pytorchs_encoder_with_a_padding_mask_is_fitted_without_nested_tensors():
    layer = nn.TransformerEncoderLayer(DIM, 2, 8, 0.0, batch_first=True)
    model = randomize(nn.TransformerEncoder(layer, 2)).eval()
    x, padding = torch.randn(3, 7, DIM), torch.arange(7) >= torch.tensor([7, 5, 4])[:, None]
    fitted = fit_norms(
        convert(model, "un", mask_from="src_key_padding_mask"), model, [{"src": x, "src_key_padding_mask": padding}]
    )
    assert all(module.running.isfinite().all() for module in fitted.modules() if hasattr(module, "running"))
    assert torch.backends.mha.get_fastpath_enabled()


def test_a_fitted_model_folds_and_the_given_models_stay():
    original, data = model_of(), batches()
    converted = convert(original, "un")
    before = copy.deepcopy(converted.state_dict())
    fitted = fit_norms(converted, original, data)
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())
    folded, report = fold(fitted, data[0])
    assert report.foldable == "2 of 2"
    torch.testing.assert_close(folded(data[0]), fitted(data[0]), rtol=1e-4, atol=1e-5)


def test_bad_input_raises():
    original, data = model_of(1), batches(1)
    with pytest.raises(ValueError, match="no batches"):
        fit_norms(convert(original, "un"), original, [])
    with pytest.raises(ValueError, match="no norm with running statistics"):
        fit_norms(model_of(1), original, data)
    with pytest.raises(ValueError, match="it has no 2"):
        fit_norms(convert(original, "un"), nn.Sequential(nn.Linear(DIM, DIM)), data)
    with pytest.raises(ValueError, match="no finite activations of real tokens at 2"):
        fit_norms(convert(original, "un"), original, [data[0] * float("nan")])


def test_a_norm_may_rest_in_some_batches():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.LayerNorm(DIM), nn.LayerNorm(DIM)

        def forward(self, x):
            return self.second(self.first(x)) if len(x) > 2 else self.first(x)

    original, data = randomize(Branch()).eval(), batches(2)
    fitted = fit_norms(convert(original, "batch"), original, [data[0], data[1][:2]])
    torch.testing.assert_close(fitted.first.running[0], torch.cat([data[0], data[1][:2]]).mean(0))
    assert fitted.second.running.isfinite().all()


class BatchNormAct2d(nn.BatchNorm2d):
    """As timm's."""

    def __init__(self, dim):
        super().__init__(dim)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


def test_a_norm_with_an_activation_is_fitted():
    original = randomize(nn.Sequential(nn.Conv2d(3, 8, 3), BatchNormAct2d(8), nn.Conv2d(8, 4, 3))).eval()
    x = torch.randn(4, 3, 9, 9)
    fitted = fit_norms(convert(original, "batch"), original, [x])
    torch.testing.assert_close(fitted(x), original(x), rtol=1e-3, atol=1e-4)


def test_an_error_leaves_the_norms_as_they_were():
    original = nn.Sequential(nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM))
    model, x = convert(original, "un"), torch.randn(4, DIM)
    before = copy.deepcopy(model.state_dict())
    original[2].weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="no finite activations of real tokens at 3"):
        fit_norms(model, original, [x], inplace=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
