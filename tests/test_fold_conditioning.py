"""The spread of a stream's channels: measured, limited, balanced. Overflow is refused."""

import pytest
import torch
from test_fold_cases import Post
from third_party_models import randomize, tokens
from torch import nn

from normkit.fold import fold
from normkit.norms import make

IDS = tokens(4, 7, high=20)


def deep(**options) -> nn.Module:
    """A post-norm stack with a channel whose gains multiply up over its depth."""
    model = randomize(Post(depth=8, **options)).eval()
    with torch.no_grad():
        for norm in model.norms:
            norm.weight.copy_(torch.tensor([1.0, 1.1, 0.9, 1.0, 0.25, 1.2]) * norm.running[1].sqrt())
    return model


def test_the_gains_of_a_post_norm_stream_multiply_up_and_a_limit_leaves_few_multiply_adds():
    model = deep()
    _, free = fold(model, IDS)
    assert free.foldable == "8 of 8"
    assert free.spread > 100
    left = []
    for limit in (64.0, 4.0):
        folded, report = fold(model, IDS, spread=limit)
        assert report.spread <= limit
        assert report.max_error < 1e-12
        left.append(report.count("multiply-add"))
        assert all("spread" in row.why for row in report if row.action == "multiply-add")
        torch.testing.assert_close(folded(IDS), model(IDS), rtol=1e-3, atol=1e-3)
    assert 0 < left[0] < left[1] < 8, left
    assert f"{free.spread:.2g}" in str(free)


def test_balanced_channels_of_a_pre_norm_stream_have_equal_ranges():
    class Pre(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.positions = nn.Embedding(20, 6), nn.Embedding(9, 6)
            self.norm, self.head = make("batch", 6), nn.Linear(6, 4)

        def forward(self, ids):
            return self.head(self.norm(self.embedding(ids) + self.positions(torch.arange(ids.shape[1]))))

    model = randomize(Pre()).eval()
    with torch.no_grad():
        model.embedding.weight[:, 2] *= 50
    _, plain = fold(model, IDS)
    folded, report = fold(model, IDS, balance=[IDS, (tokens(3, 5, high=20),)])
    assert plain.spread > 10
    assert report.spread == pytest.approx(1.0)
    assert report.foldable == "1 of 1"
    assert report.max_error < 1e-12
    assert folded.embedding.weight[:, 2].abs().max() < model.embedding.weight[:, 2].abs().max()


def test_balance_and_limit_together_leave_no_more_than_the_limit_alone():
    _, alone = fold(deep(), IDS, spread=16.0)
    _, both = fold(deep(), IDS, spread=16.0, balance=[IDS])
    assert both.spread <= 16
    assert both.count("multiply-add") <= alone.count("multiply-add")


class Padded(nn.Module):
    """A norm between convolutions whose zero padding allows no shift."""

    def __init__(self, given: bool):
        super().__init__()
        self.one, self.other = nn.Conv2d(2, 6, 1), nn.Conv2d(2, 6, 1)
        self.norm = nn.BatchNorm2d(6)
        self.before, self.after = nn.Conv2d(6, 3, 3, padding=1), nn.Conv2d(6, 3, 3, padding=1)
        self.given = given

    def forward(self, x):
        one, other = self.one(x), self.other(x)
        if self.given:  # the norm reads something nonlinear
            return torch.cat([self.before(one), self.after(self.norm(other.relu()) + one)], 1)
        return torch.cat([self.before(one + other), self.after(self.norm(one + other))], 1)


def test_of_a_norm_before_padding_an_addition_stays_with_balance_too():
    x, model = torch.randn(2, 2, 9, 9), randomize(Padded(given=False)).eval()
    with torch.no_grad():
        model.one.weight[2] *= 100
    _, plain = fold(model, x)
    _, balanced = fold(model, x, balance=[x])
    assert [plain.count("add"), balanced.count("add")] == [1, 1]
    assert plain.spread > 10
    assert balanced.spread == pytest.approx(1.0)
    assert balanced.max_error < 1e-12


def test_a_gain_that_exceeds_the_limit_is_not_folded_to_leave_an_addition():
    x, model = torch.randn(2, 2, 9, 9), randomize(Padded(given=True)).eval()
    with torch.no_grad():
        model.norm.weight[2] *= 1e-3
    _, free = fold(model, x)
    folded, limited = fold(model, x, spread=8)
    assert [free.count("add"), limited.count("multiply-add")] == [1, 1]
    assert limited.spread <= 8 < 100 < free.spread
    assert limited.max_error < 1e-12
    torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-4)
