"""Folding in models of pictures and volumes."""

import copy

import pytest
import torch
from fold_cases import DIM, check
from third_party_models import randomize
from torch import Tensor, nn

from normkit.fold import fold
from normkit.norms import make

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


class Residual(nn.Module):
    """Convolutions and norms beside a residual; the last norm is added to the stream or stands behind it."""

    def __init__(self, post: bool):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(n, DIM, 1, bias=n == 3) for n in (3, DIM, DIM))
        self.norms, self.head, self.post = (
            nn.ModuleList(nn.BatchNorm2d(DIM) for _ in range(3)),
            nn.Conv2d(DIM, 2, 1),
            post,
        )

    def forward(self, x: Tensor) -> Tensor:
        relu, (a, b, c), (f, g, h) = torch.relu, self.convs, self.norms
        x = relu(f(a(x)))
        return self.head(relu(x + h(c(relu(g(b(x)))))) if self.post else h(x + c(relu(g(b(x))))))


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("key", ["weight", "bias"])
@pytest.mark.parametrize("value", [0.0, 1e-10, 1e-15, 1e-42, -1e-13, 1e6])
def test_one_channel_of_another_size_keeps_no_norm(post, key, value):
    model = randomize(Residual(post)).eval()
    with torch.no_grad():
        for norm in model.norms[1:]:
            getattr(norm, key)[2] = value
    folded, report = fold(model, x := torch.randn(2, 3, 5, 5))
    assert report.count("folded", "folded back") == 3, str(report)
    assert report.max_error < 1e-12
    assert report.native_error < 1e-5
    ordinary = sum(p.numel() for p in fold(randomize(Residual(post)).eval(), x)[0].parameters())
    assert sum(p.numel() for p in folded.parameters()) == ordinary, "rounding errors make no bias"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gains_that_weight_decay_switched_off_fold_in_any_type(dtype):
    model = randomize(nn.Sequential(nn.Linear(4, DIM), make("un", DIM), nn.Tanh(), nn.Linear(DIM, DIM),
                                    make("power(groups=0)", DIM), nn.Linear(DIM, 2))).eval().to(dtype)  # fmt: skip
    with torch.no_grad():
        for norm in (model[1], model[4]):
            norm.weight[:3] = torch.tensor([1e-14, -1e-30, 5e-324])
    folded, report = fold(model, x := torch.randn(40, 4, dtype=dtype))
    assert report.foldable == "2 of 2"
    assert report.max_error < 1e-12
    torch.testing.assert_close(folded(x), model(x), rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)
