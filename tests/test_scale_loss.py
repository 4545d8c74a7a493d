"""The loss that draws the scales of tokens together, by itself and in a run."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normkit.models import convert, scale_loss
from normkit.models.scale_loss import scale_deviation
from normkit.norms import make


def test_scale_loss_measures_the_spread_of_scales_and_trains_it_away():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    x = torch.randn(20, 6) * torch.linspace(0.2, 3, 20)[:, None]
    optimizer, seen = torch.optim.Adam(model.parameters(), 0.05), []
    with scale_loss(model) as scales:
        for _ in range(60):
            read = model[0](x).detach()
            model(x)
            with torch.no_grad():
                model(x * torch.linspace(1, 9, 20)[:, None])  # an evaluation does not count
            loss = scales()
            ratio = read.square().mean(1).sqrt() / read.square().mean().sqrt()
            torch.testing.assert_close(loss.detach(), (ratio - 1).square().mean())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(float(loss.detach()))
    assert seen[-1] < seen[0] / 2
    assert not model[1]._forward_pre_hooks
    with pytest.raises(ValueError, match="norm"), scale_loss(model[0]):
        pass


def test_tokens_of_zeros_and_padding_give_finite_gradients():
    model = nn.ModuleList([make("un", 6)])
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    x[0, 1] = 0.0
    x[2, 2:] = torch.nan
    mask = ~x[..., 0].isnan()
    for real in (mask, torch.zeros_like(mask)):
        leaf = x.clone().requires_grad_()
        with scale_loss(model) as scales:
            model[0](leaf, real)
            loss = scales()
        loss.backward()
        square = x[real].square().mean(-1)
        expected = ((square / square.mean()).sqrt() - 1).square().mean() if real.any() else torch.tensor(0.0)
        torch.testing.assert_close(loss.detach(), expected)
        assert leaf.grad.isfinite().all()
        assert not leaf.grad[~real].any()


@pytest.mark.parametrize("masked", [False, True])
def test_the_gradient_is_that_of_the_formula(masked):
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0), dtype=torch.double).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 0]]).bool() if masked else None
    assert torch.autograd.gradcheck(lambda x: scale_deviation(x, mask), x)
    halves = x.detach().bfloat16().requires_grad_()
    (found,) = torch.autograd.grad(scale_deviation(halves, mask), halves)
    (expected,) = torch.autograd.grad(scale_deviation(x, mask), x)
    torch.testing.assert_close(found.double(), expected, rtol=0.1, atol=1e-3)


def test_a_token_of_a_picture_has_all_channels():
    model, x = nn.Sequential(nn.BatchNorm2d(3)), torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    square = x.square().mean(1)
    expected = ((square / square.mean()).sqrt() - 1).square().mean()
    for each in (model, convert(model, "un")):
        with scale_loss(each) as scales:
            each(x)
            torch.testing.assert_close(scales(), expected)


def test_checkpointed_blocks_count_once():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6))
    gradients = []
    for forward in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        with scale_loss(model) as scales:
            for _ in range(2):
                model.zero_grad()
                y = forward(torch.linspace(-1, 2, 30).view(5, 6))
                (y.square().mean() + scales()).backward()
        gradients.append(model[0].weight.grad.clone())
    torch.testing.assert_close(*gradients)
    with scale_loss(model) as scales, pytest.raises(ValueError, match="forward"):
        scales()
