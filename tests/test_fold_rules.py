"""Operations that pass coordinates: multiples, interpolation, rows in the place of others."""

from collections.abc import Callable

import pytest
import torch
from fold_cases import DIM, both_agree_on
from torch import Tensor, nn

from normkit.norms import make


class Passed(nn.Module):
    """A layer that reads `how(norm's output, another layer's output, input)`."""

    def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.norm, self.beside, self.last, self.how = make("batch", DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 4), how

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.how(self.norm(torch.tanh(x)), self.beside(x), x))


HOW = {
    "a sum": lambda y, z, x: y.flip(0) + y,
    "a sum of multiples": lambda y, z, x: y * 3.0 - y.flip(0) / 2,
    "a mean": lambda y, z, x: y.mean(1),
    "Python's sum": lambda y, z, x: sum([y, y.flip(0)]),
    "neg": lambda y, z, x: -y,
    "add with a factor": lambda y, z, x: torch.add(z, y, alpha=2),
    "sub with a factor": lambda y, z, x: torch.sub(z, y, alpha=3),
    "lerp": lambda y, z, x: y.lerp(z, 0.3),
    "addcmul": lambda y, z, x: torch.addcmul(y, z, torch.sigmoid(x), value=2),
    "slice_scatter": lambda y, z, x: y.slice_scatter(z[:, :2], 1, 0, 2),
    "select_scatter": lambda y, z, x: y.select_scatter(z[:, 1], 1, 0),
    "masked_scatter": lambda y, z, x: y.masked_scatter((x[..., :1] > 1).expand_as(y), z),
    "masked_scatter, one column": lambda y, z, x: y.masked_scatter(x[..., :1] > 1, z),
}


@pytest.mark.parametrize("name", HOW)
def test_operations_that_pass_coordinates(name):
    x = torch.randn(2, 5, DIM, generator=torch.Generator().manual_seed(0)).clamp(max=0.9)  # masks nothing
    both_agree_on(Passed(HOW[name]), (x,), (torch.randn(3, 7, DIM),), "folded")


@pytest.mark.parametrize("width", [DIM, 1])
def test_elements_of_any_row_written_over_a_norm_keep_it(width):
    masks = {DIM: lambda y, z, x: y.masked_scatter(x > 1, z), 1: lambda y, z, x: y.masked_scatter(x[0, 0] > 1, z)}
    both_agree_on(Passed(masks[width]), (torch.zeros(2, 5, DIM),), (torch.randn(3, 7, DIM),), "multiply-add")
