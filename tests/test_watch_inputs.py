"""Inputs that are rare in training do not disturb a recording."""

import copy

import pytest
import torch
from torch import nn

import normkit
from normkit.watch import Row, diagnose, record


def gaps(batches, norm=None):
    """The last recorded gap of quadratic means."""
    norm = norm or nn.LayerNorm(4)
    with record(norm, every=1) as rows:
        for x, *mask in batches:
            norm(x, *mask).sum().backward()
    return [row.value for row in rows if row.quantity == "gap_quadratic"]


@pytest.mark.parametrize("shape", [(0, 4), (0, 3, 4), (4,), (2, 0, 4)])
def test_no_token_and_a_single_one(shape):
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    with record(model, every=1) as rows:
        for x in (torch.randn(shape), torch.randn(3, 4)):
            model(x).sum().backward()
    assert {row.step for row in rows if row.quantity == "rms"} >= {2}


def test_sparse_gradients():
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.LayerNorm(4))
    with record(model, quantities=["gradient_norm"], every=1) as rows:
        model(torch.tensor([[1, 2, 2]])).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad.to_dense() for p in model.parameters()])
    assert [row.value for row in rows] == [pytest.approx(float(expected))]


def test_a_first_batch_that_is_not_finite_or_all_padding_is_forgotten():
    torch.manual_seed(0)
    batches = [(torch.randn(64, 4),) for _ in range(6)]
    clean = gaps(batches)
    assert gaps([(torch.full((64, 4), torch.nan),), *batches])[-4:] == pytest.approx(clean[-4:], rel=0.5)
    real = [(x, torch.ones(64, dtype=torch.bool)) for (x,) in batches]
    padding = (torch.randn(64, 4), torch.zeros(64, dtype=torch.bool))
    masked = gaps([padding, *real], normkit.make("layer", 4))
    assert masked[-4:] == pytest.approx(clean[-4:], rel=0.5)


def test_the_gap_between_modes_of_a_loss_below_zero():
    rows = [Row(1, "", "", "loss_train_mode", -2.0), Row(1, "", "", "loss_eval_mode", -2.0)]
    found = [[finding.message for finding in diagnose([rows[0], rows[1]._replace(value=x)])] for x in (-2.0, -1.0)]
    assert [any("the loss is" in message for message in each) for each in found] == [False, True]


def test_a_copy_of_the_model_is_not_recorded():
    model = nn.Sequential(nn.Embedding(9, 6, padding_idx=0), nn.Linear(6, 6), normkit.make("un", 6))
    with record(model, every=1) as rows:
        for forward in (model, copied := copy.deepcopy(model), model, torch.compile(copied, backend="eager")):
            forward(torch.tensor([[3, 4], [5, 0]])).sum().backward()
    assert {row.step for row in rows} == {1, 2}
