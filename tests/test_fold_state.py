"""Folding models that keep state, and folding where gradients are off."""

import copy
from collections import UserDict

import pytest
import torch
from fold_cases import DIM, Read, check
from third_party_models import randomize
from torch import Tensor, nn

from normkit.fold import audit, fold
from normkit.models import export
from normkit.norms import make


class Average(nn.Module):
    """Keeps a moving average of a norm's output, and reads it in no output."""

    def __init__(self, assigns: bool = False):
        super().__init__()
        self.first, self.norm, self.last, self.assigns = (
            nn.Linear(DIM, DIM),
            make("batch", DIM),
            nn.Linear(DIM, 3),
            assigns,
        )
        self.register_buffer("mean", torch.zeros(1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        mean = y.mean(0, keepdim=True) * 0.1
        if self.assigns:
            self.mean = self.mean * 0.9 + mean
        else:
            self.mean.mul_(0.9).add_(mean)
        return self.last(y)


@pytest.mark.parametrize("assigns", [False, True])
def test_a_buffer_that_the_forward_changes_holds_the_original_numbers(assigns):
    model = Average(assigns)
    folded, _ = check(model, torch.randn(4, DIM))  # the buffer of the original stays as well
    assert not bool(folded.mean.any())
    for _ in range(3):
        x = torch.randn(4, DIM)
        torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded.mean, model.mean, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_folded_in_inference_mode_can_be_trained():
    model = randomize(Read(nn.Linear(DIM, 4))).eval()
    with torch.inference_mode():
        folded, report = fold(model, torch.randn(3, DIM))
    assert report.foldable == "1 of 1"
    folded(torch.randn(3, DIM)).sum().backward()
    assert folded.reader.weight.grad is not None


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_batch_of_keywords_is_an_example(kind, tmp_path):
    model, batch = randomize(Read(nn.Linear(DIM, 4))).eval(), kind(x=torch.randn(3, DIM))
    assert fold(model, batch)[1].foldable == audit(model, batch).foldable == "1 of 1"
    assert export(model, tmp_path / "model.pt2", batch).max_error < 1e-6


def test_a_mapping_that_the_model_takes_stays_one():
    class Takes(Read):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["x"])

    model, batch = Takes(nn.Linear(DIM, 4)), {"x": torch.randn(3, DIM)}
    folded, _ = check(model, batch, actions="folded")
    torch.testing.assert_close(folded(copy.copy(batch)), model(batch), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="on the example"):
        fold(model, {"y": batch["x"]})
