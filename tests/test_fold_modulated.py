"""Norms times a computed tensor: adaLN, conditional and gated norms."""

import pytest
import torch
from fold_cases import DIM, Read, check
from torch import Tensor, nn
from torch.nn import functional as F

from normkit.norms import make


class Block(nn.Module):
    """A block of a diffusion Transformer (Peebles and Xie 2023), with adaLN-Zero."""

    def __init__(self, spec: str):
        super().__init__()
        self.norm1, self.norm2 = make(spec, DIM), make(spec, DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 8), nn.Linear(8, DIM)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(DIM, 6 * DIM))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).chunk(3, -1)
        x = x + gate1 * self.out(F.scaled_dot_product_attention(q, k, v))
        return x + gate2 * self.down(F.gelu(self.up(self.norm2(x) * (1 + scale2) + shift2)))


def test_a_modulated_norm_folds_into_what_reads_it_and_the_layer_of_its_shift():
    model = Block("un(affine=False)")
    folded, report = check(model, torch.randn(3, 5, DIM), torch.randn(3, DIM), actions="folded, folded")
    assert [row.into for row in report] == [("qkv",), ("up",)]
    before, after = (each.modulation[1].weight.view(6, DIM, DIM) for each in (model, folded))
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [False, True, True] * 2


def test_the_bias_of_a_modulated_norm_stays():
    _, report = check(Block("un"), torch.randn(3, 5, DIM), torch.randn(3, DIM), actions="add, add")
    assert "a factor between the norm and its reader" in report.rows[0].why


class Conditional(nn.Module):
    """A norm times a linear map of a condition, plus another."""

    def __init__(self, condition: nn.Module):
        super().__init__()
        self.norm, self.condition, self.head = make("un(bias=False)", DIM), condition, nn.Linear(DIM, 4)
        self.scale, self.shift = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        condition = self.condition(condition)
        return self.head(self.scale(condition) * self.norm(torch.tanh(x)) + self.shift(condition))


def test_of_two_followed_factors_the_norm_passes_its_gain():
    example = torch.randn(3, 5, DIM), torch.randn(3, 5, DIM)
    check(Conditional(nn.Identity()), *example, actions="folded")
    check(Conditional(make("un", DIM)), *example, actions="folded, folded")


@pytest.mark.parametrize("gated", [
    lambda self, y: self.reader(y * torch.sigmoid(self.gate(y))),
    lambda self, y: self.reader(y / (1 + self.gate(y).square())),
    lambda self, y: self.reader(F.silu(self.gate(y)) * y.flip(-1)),
])  # fmt: skip
def test_a_norm_that_also_computes_its_gate_folds(gated):
    model = Read(nn.Linear(DIM, 4), gated, "un(bias=False)")
    model.gate = nn.Linear(DIM, DIM)
    check(model, torch.randn(3, 5, DIM), actions="folded")


@pytest.mark.parametrize("read", [
    lambda self, y: self.reader(y * y.roll(1, -1)),
    lambda self, y: self.reader(torch.sigmoid(y) / y.square().add(1) + y.square()),
    lambda self, y: self.reader(self.reader.weight.sum() / (y * y + 1)),
])  # fmt: skip
def test_a_norm_times_itself_stays(read):
    check(Read(nn.Linear(DIM, 4), read, "un(bias=False)"), torch.randn(3, 5, DIM), actions="multiply-add")
