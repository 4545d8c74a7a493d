"""Folding in models of pictures and volumes."""

import copy

import pytest
import torch
from fold_cases import DIM, check
from torch import Tensor, nn

VOLUMES = {
    "trilinear": lambda y: nn.functional.interpolate(y, scale_factor=2, mode="trilinear"),
    "nearest": lambda y: nn.functional.interpolate(y, scale_factor=2),
    "nearest-exact": lambda y: nn.functional.interpolate(y, scale_factor=2, mode="nearest-exact"),
    "adaptive": lambda y: nn.functional.adaptive_avg_pool3d(y, 2),
    "reflect": lambda y: nn.functional.pad(y, (1, 1, 0, 1, 1, 0), mode="reflect"),
    "replicate": lambda y: nn.functional.pad(y, (1, 1, 0, 1, 1, 0), mode="replicate"),
    "shuffle": lambda y: nn.functional.channel_shuffle(y, 2),
}


@pytest.mark.parametrize("how", VOLUMES)
def test_volumes_are_resized_and_padded_like_pictures(how):
    class Volume(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm3d(DIM), nn.Conv3d(DIM, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(VOLUMES[how](self.norm(torch.tanh(x))))

    check(Volume(), torch.randn(2, DIM, 4, 4, 4), actions="folded")


TRANSPOSED = {
    "1-d, one position each": (nn.BatchNorm1d, nn.ConvTranspose1d(DIM, DIM, 2, stride=2)),
    "2-d, overlapping": (nn.BatchNorm2d, nn.ConvTranspose2d(DIM, DIM, 3, stride=2, padding=1, output_padding=1)),
    "2-d, groups, no bias": (nn.BatchNorm2d, nn.ConvTranspose2d(DIM, DIM, 3, groups=2, dilation=2, bias=False)),
    "3-d": (nn.BatchNorm3d, nn.ConvTranspose3d(DIM, DIM, 2, stride=2, groups=DIM)),
}


@pytest.mark.parametrize("kind", TRANSPOSED)
def test_transposed_convolutions_take_scales_and_write_shifts(kind):
    norm, layer = TRANSPOSED[kind]

    def model(*parts: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Tanh(), *parts, nn.Tanh())

    x = torch.randn(2, DIM, *[4] * (layer.weight.dim() - 2))
    check(model(layer, norm(DIM)), x, actions="folded back")
    check(model(norm(DIM), layer), x, actions="add")  # an output may read no input
    check(model(layer, norm(DIM), copy.deepcopy(layer)), x, actions="folded")  # the shift goes back
