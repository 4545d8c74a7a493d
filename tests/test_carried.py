"""What a norm hands on when another takes its place: gains, statistics and what it has learned besides."""

import pytest
import torch
from torch import nn

from normkit.norms import make
from normkit.transforms import convert


@pytest.mark.parametrize("old", ["scale", "scale(unit_init=True)", "scale(learn=False)", "scale(affine=False)"])
@pytest.mark.parametrize("to", ["rms", "scale(eps=1e-6)", "scale(unit_init=True)", "scale(bias=True)"])
def test_one_length_becomes_gains_and_stays_a_length(old, to):
    """ScaleNorm(g) is RMSNorm(g / sqrt(dim)); its length is learned on if it was learned."""
    model, x = nn.Sequential(make(old, 16)), torch.randn(3, 16)
    if model[0].weight is not None:
        nn.init.constant_(model[0].weight, 0.7)
    converted = convert(model, to)
    torch.testing.assert_close(converted(x), model(x), rtol=1e-4, atol=1e-5)
    assert converted[0].weight.requires_grad == (old in ("scale", "scale(unit_init=True)"))
