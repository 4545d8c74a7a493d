"""Similarity of layers, and singular values of embeddings."""

import copy

import pytest
import torch
from normkit_papers.cka import cka
from normkit_papers.singular_values import embedding_rows
from torch import nn

from normkit.watch import Row


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Identity(), nn.Linear(5, 5, bias=False), nn.Linear(5, 7)

    def forward(self, x):
        return self.c(self.b(self.a(x)).relu())


def test_cka_is_the_unbiased_one_of_minibatches():
    torch.manual_seed(0)
    model, batches = Layers().double(), [torch.randn(9, 5).double() + 1 for _ in range(3)]
    nn.init.orthogonal_(model.b.weight, 3.0)
    found = cka(model, model, batches, ["a", "b", "c"])
    assert found.layers == ("a", "b", "c")
    torch.testing.assert_close(found.values.diagonal(), torch.ones(3).double())
    assert found.values[0, 1] == pytest.approx(1), "rotations and sizes do not matter"

    def hsic(k, l):  # noqa: E741 - the definition, sum by sum
        n = len(k)
        pairs = [(i, j) for i in range(n) for j in range(n) if i != j]
        first = sum(k[i, j] * l[i, j] for i, j in pairs) / (n * (n - 1))
        third = sum(k[i, j] * l[i, m] for i, j in pairs for m in range(n) if m not in (i, j)) / (n * (n - 1) * (n - 2))
        second = sum(
            k[i, j] * l[p, q] for i, j in pairs for p, q in pairs if len({i, j, p, q}) == 4
        ) / (n * (n - 1) * (n - 2) * (n - 3))  # fmt: skip
        return first + second - 2 * third

    sums = torch.zeros(3).double()
    for x in batches:
        y = model(x).detach()
        k, l = x @ x.T, y @ y.T  # noqa: E741
        sums += torch.stack([hsic(k, l), hsic(k, k), hsic(l, l)])
    torch.testing.assert_close(found.values[0, 2], sums[0] / (sums[1] * sums[2]).sqrt())


def test_cka_of_two_models():
    torch.manual_seed(0)
    one, two = Layers(), Layers()
    batches = [{"x": torch.randn(40, 5)} for _ in range(4)]
    found = cka(one, copy.deepcopy(one), batches, ["c"])
    assert found.values.item() == pytest.approx(1)
    assert found.rows(7) == [Row(7, "c|c", "", "cka", pytest.approx(1))]
    plain = [batch["x"] for batch in batches]
    assert cka(one, nn.Sequential(two), plain, ["*b", "*c"]).others == ("0.b", "0.c")
    assert one.training
    for layers, some in (["z"], batches), (["c"], []), (["c"], [torch.zeros(3, 5)]):
        with pytest.raises(ValueError, match=r"layer|batches"):
            cka(one, two, some, layers)


def test_cka_of_features_with_a_large_common_part():
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 5))
    nn.init.constant_(model[1].bias, 1e4)
    found = cka(model, model, [torch.randn(40, 5)], ["0", "1"])
    assert 0.5 < found.values[0, 1] <= 1


def test_singular_values_of_embeddings():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 8))
    rows = embedding_rows(model, 5, points=4)
    assert [row.quantity for row in rows] == [f"singular_value[{i}]" for i in (0, 2, 5, 7)]
    values = torch.linalg.svdvals(model[0].weight.detach())
    assert [row.value for row in rows] == pytest.approx((values / values[0])[[0, 2, 5, 7]].tolist())
