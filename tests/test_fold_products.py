"""Products other than a Linear's: einsum, matrices on the left, experts in a batch."""

import pytest
import torch
from fold_cases import DIM, Read, check
from torch import Tensor, nn

from normkit.fold import fold
from normkit.norms import make


class Stream(nn.Module):
    """A norm of a stream that something else reads, and a product with a parameter behind it."""

    def __init__(self, size: tuple[int, ...], product, spec: str = "un(bias=False)"):
        super().__init__()
        self.norm, self.weight, self.product = make(spec, DIM), nn.Parameter(torch.randn(size)), product

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(x)
        return torch.sigmoid(x), self.product(self.norm(x), self.weight)


PRODUCTS = {
    "einsum": ((DIM, 8), lambda x, w: torch.einsum("btd,do->bto", x, w)),
    "einsum, transposed": ((8, DIM), lambda x, w: torch.einsum("btd,od->bto", x, w)),
    "einsum, the weight on the left": ((8, DIM), lambda x, w: torch.einsum("od,btd->bot", w, x)),
    "einsum into heads": ((DIM, 2, 4), lambda x, w: torch.einsum("btd,dhk->bhtk", x, w)),
    "einsum in heads": ((2, 3, 4), lambda x, w: torch.einsum("bthd,hde->bthe", x.unflatten(-1, (2, 3)), w)),
    "parts of a weight": ((4, DIM, 8), lambda x, w: torch.cat([x.bmm(w[:2]), x.bmm(w[2:])])),
    "a matrix on the left": ((8, DIM), lambda x, w: w @ x[0].mT),
    "matrices on the left": ((2, 8, DIM), lambda x, w: w.bmm(x.mT)),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_norms_fold_into_parameters_of_any_product(name):
    check(Stream(*PRODUCTS[name]), torch.randn(2, 5, DIM), actions="folded")


def test_a_shift_stays_where_a_product_has_no_bias():
    check(Stream(*PRODUCTS["einsum into heads"], "batch"), torch.randn(2, 5, DIM), actions="add")


def test_a_weight_that_is_the_same_for_all_groups_or_a_copy_is_only_read():
    repeated = Stream((1, DIM, 4), lambda x, w: x.bmm(w.expand(len(x), -1, -1)))
    check(repeated, torch.randn(2, 5, DIM), actions="multiply-add")
    copied = Stream((3, DIM, 4), lambda x, w: torch.einsum("btd,edf->btef", x, w))
    check(copied, torch.randn(2, 5, DIM), actions="multiply-add")


class Experts(nn.Module):
    """As in Llama 4: every expert gets all rows, times its gate, in one batch of products."""

    def __init__(self, experts: int = 3, width: int = 4):
        super().__init__()
        self.embedding, self.norm, self.router = nn.Embedding(20, DIM), make("un", DIM), nn.Linear(DIM, experts)
        self.up = nn.Parameter(torch.randn(experts, DIM, 2 * width))
        self.down = nn.Parameter(torch.randn(experts, width, DIM))
        self.last, self.head = make("un", DIM), nn.Linear(DIM, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = self.norm(x).flatten(0, 1)
        gates = torch.sigmoid(self.router(y)).T.unsqueeze(-1)
        gate, value = torch.bmm(y.expand(len(gates), -1, -1) * gates, self.up).chunk(2, -1)
        return self.head(self.last(x + torch.bmm(value * torch.relu(gate), self.down).sum(0).view_as(x)))


def test_norms_fold_into_experts_in_a_batch_and_out_of_them():
    check(Experts(), torch.randint(20, (2, 6)), actions="folded, folded")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_reads_the_type_of_a_norms_weight_folds(dtype):
    def block(self, x):
        return self.reader(x.to(self.norm.weight.dtype))

    folded, report = fold(Read(nn.Linear(DIM, 4), block).to(dtype).eval(), torch.randn(2, 5, DIM, dtype=dtype))
    assert [row.action for row in report] == ["folded"], report
    assert folded.norm.weight.dtype == dtype
    assert folded.half().norm.weight.dtype == torch.float16
    assert [*folded.state_dict()] == ["reader.weight", "reader.bias"]


def test_a_product_with_complex_numbers_is_only_read():
    def spectrum(self, y):
        return torch.view_as_real(self.reader(torch.complex(y, y.square())).transpose(0, 1))

    model = Read(nn.Linear(DIM, 4, dtype=torch.complex128), spectrum).double()
    _, report = fold(model.eval(), torch.randn(2, 5, DIM).double())
    assert [row.action for row in report] == ["multiply-add"]
