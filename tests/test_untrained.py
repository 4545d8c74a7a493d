"""`fold` and `export` warn of running statistics that no training has set."""

import warnings

import pytest
import torch
from torch import nn

import normkit as nk

X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def made(spec, steps=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nk.make(spec, 4), nn.Linear(4, 4))
    for _ in range(steps):
        model(X)
    return model.eval()


def calibrated(spec):
    return nk.calibrate(made(spec, 2), [(X,)])


def loaded(spec):
    model = made(spec)
    model.load_state_dict(calibrated(spec).state_dict())
    return model


@pytest.mark.parametrize(
    "model",
    [made("layer"), made("rms"), made("pnv", 1), made("un(warmup=5)", 6), calibrated("un"), loaded("un"),
     nk.convert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), "layer")],
)  # fmt: skip
def test_statistics_that_were_meant_are_silent(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nk.fold(model, X)


@pytest.mark.parametrize(
    ("model", "state"),
    [(made("un"), "never"), (made("pnv"), "never"), (made("un(warmup=5)", 3), "warm-up"),
     (made("power", 3), "warm-up"), (made("un(warmup=auto)", 3), "warm-up")],
)  # fmt: skip
def test_statistics_that_are_not_trained_are_named(model, state, tmp_path):
    for verb in (lambda: nk.fold(model, X), lambda: nk.export(model, tmp_path / "model.pt2", X)):
        with pytest.warns(UserWarning, match=state) as found:
            verb()
        assert len([warning for warning in found if "(1)" in str(warning.message)]) == 1
