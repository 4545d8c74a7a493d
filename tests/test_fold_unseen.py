"""What an example does not show and a later input does: the folded model must be right there, too."""

import pytest
import torch
import torch.nn.functional as F
from fold_cases import DIM, check
from torch import Tensor, nn

from normkit.norms import make
from normkit.transforms import to_rms
from normkit.transforms.prove import error


class Two(nn.Module):
    """A norm and two layers; what is done with them is `how(norm's output, a, b, the rest of the arguments)`."""

    def __init__(self, how, spec: str = "batch"):
        super().__init__()
        self.norm, self.a, self.b, self.how = make(spec, DIM), nn.Linear(DIM, 4), nn.Linear(DIM, 4), how

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.how(self.norm(torch.tanh(x)), self.a, self.b, *rest)


def both_agree(model: Two, example: tuple, later: tuple, actions: str) -> str:
    """Fold by an example, compare on another input; why the norm became what it is."""
    folded, report = check(model, *example, actions=actions)
    with torch.no_grad():
        assert error(folded(*later), model(*later)) < 1e-5
    return report.rows[0].why


@pytest.mark.parametrize(("spec", "action"), [("batch", "multiply-add"), ("layer", "kept")])
def test_a_layer_that_no_call_reached_keeps_the_norm_that_it_may_read(spec, action):
    def by_length(y, a, b):
        return a(y) if y.shape[1] < 50 else b(y)

    x, long = torch.randn(2, 7, DIM), torch.randn(2, 60, DIM)
    why = both_agree(Two(by_length, spec), (x,), (long,), action)
    assert "no call that was tried used b.weight" in why
    assert both_agree(Two(lambda y, a, b: a(y) + b(y)), (x,), (long,), "folded") == ""


def test_a_layer_that_no_call_reached_keeps_the_centring():
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.write, self.norm, self.a, self.b = (
                nn.Linear(3, DIM),
                nn.LayerNorm(DIM),
                nn.Linear(DIM, 2),
                nn.Linear(DIM, 2),
            )

        def forward(self, x):
            x = self.write(x)
            return self.a(self.norm(x)) if x.shape[1] < 50 else self.b(x)

    _, report = to_rms(Stream().eval(), torch.randn(2, 5, 3))
    assert (report.rows[0].action, "b.weight" in report.rows[0].why) == ("kept", True)


@pytest.mark.parametrize("how", ["masked_fill", "where"])
def test_a_mask_that_masks_nothing_yet(how):
    def masked(y, a, b, mask):
        if how == "where":
            return a(torch.where(mask[..., None], y, 0.0)) + b(y)
        return a(y.masked_fill(~mask[..., None], 0.0)) + b(y)

    x, none, some = torch.randn(2, 5, DIM), torch.ones(2, 5, dtype=torch.bool), torch.arange(10).view(2, 5) % 3 > 0
    both_agree(Two(masked), (x, none), (x, some), "add" if how == "masked_fill" else "multiply-add")


@pytest.mark.parametrize("factor", [torch.tensor(0.5), torch.tensor([1.0])])
def test_a_factor_that_the_caller_passes_is_not_folded_in(factor):
    model = Two(lambda y, a, b, f: a(y * f) + b(y))
    x = torch.randn(2, 5, DIM)
    both_agree(model, (x, factor), (x, factor + 2), "multiply-add")


def test_padding_of_pictures_that_are_not_square():
    def windows(y, a, b):
        y = F.pad(y, (0, 0, 0, y.shape[2] % 2, 0, y.shape[1] % 2))
        return a(y[:, ::2, ::2]) + b(y[:, 1::2, 1::2])

    class Pictures(Two):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1))

    example, later = torch.randn(2, DIM, 12, 20), torch.randn(2, DIM, 13, 21)
    both_agree(Pictures(windows), (example,), (later,), "add")
