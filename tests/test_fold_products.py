"""Products other than a Linear's: einsum, matrices on the left, experts in a batch."""

import pytest
import torch
from fold_cases import DIM, Read, both_agree_on, check
from torch import Tensor, nn

from normkit.fold import fold
from normkit.fold.relations import Relations
from normkit.fold.survey import Survey
from normkit.models.invoke import Call
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


class Routed(nn.Module):
    """Two of many experts, slices of stacked weights and biases, add their rows; some experts are reached rarely."""

    def __init__(self, experts: int, rank=lambda scores: scores.softmax(-1).topk(2), spec: str = "un"):
        super().__init__()
        self.words, self.norm, self.router = nn.Embedding(30, DIM), make(spec, DIM), nn.Linear(DIM, experts)
        self.up, self.up_bias = nn.Parameter(torch.randn(experts, DIM, 4)), nn.Parameter(torch.randn(experts, 4))
        self.down = nn.Parameter(torch.randn(experts, DIM, 4))
        self.last, self.head, self.rank = make(spec, DIM), nn.Linear(DIM, 30), rank

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).flatten(0, 1)
        y = self.norm(x)
        scores, chosen = self.rank(self.router(y))
        out = torch.zeros_like(y)
        for expert in chosen.unique().tolist():
            rows, place = torch.where(chosen == expert)
            hidden = torch.relu(y[rows] @ self.up[expert] + self.up_bias[expert])
            out.index_add_(0, rows, hidden @ self.down[expert].T * scores[rows, place, None])
        return self.head(self.last(x + out))


class Switch(Routed):
    """As many layers, one for each row, sorted by its score."""

    def __init__(self, experts: int, spec: str = "un"):
        super().__init__(experts, lambda scores: (values[:, :1] for values in scores.sort(descending=True)), spec)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(experts))
        del self.up, self.up_bias, self.down

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids).flatten(0, 1)
        out, (scores, chosen) = torch.zeros_like(x), self.rank(self.router(y := self.norm(x)))
        for number, expert in enumerate(self.experts):
            rows = (chosen[:, 0] == number).nonzero()[:, 0]
            out.index_add_(0, rows, expert(y[rows]) * scores[rows])
        return self.head(self.last(x + out))


@pytest.mark.parametrize("kind", [Routed, Switch])
@pytest.mark.parametrize("spec", ["un", "rms"])
def test_norms_fold_into_many_experts_most_of_which_the_example_does_not_reach(kind, spec):
    few, many = torch.randint(30, (1, 3)), torch.randint(30, (8, 64))
    action = "folded" if spec == "un" else "gain folded"
    _, report = both_agree_on(kind(24, spec=spec), (few,), (many,), f"{action}, {action}")
    assert any("experts in turn" in label for label in report.tried)


def test_an_expert_that_no_router_can_be_made_to_choose_keeps_the_norm():
    model = Routed(12, lambda scores: (scores[:, :2], torch.full_like(scores[:, :2], 3, dtype=torch.long)))
    _, report = check(model, torch.randint(30, (2, 9)), actions="multiply-add, multiply-add")
    assert "up" in report.rows[0].why


def test_the_time_of_a_plan_is_linear_in_the_number_of_slices():
    def links(slices: int) -> int:
        model = Stream((slices, DIM, 4), lambda x, w: sum(torch.tanh(x @ part) for part in w), "rms").eval()
        example = Call((torch.randn(2, 3, DIM),), {})
        return len(Relations(Survey(model, example, None, False, False, "fold").trace, model, {}).links)

    assert links(80) < 5 * links(20)


def test_slices_of_one_weight_that_differ_fold_each_its_own_norm():
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(make("rms", DIM) for _ in range(12))
            self.weight = nn.Parameter(torch.randn(12, DIM, DIM))

        def forward(self, x: Tensor) -> Tensor:
            for norm, weight in zip(self.norms, self.weight, strict=True):
                x = x + torch.tanh(norm(x) @ weight)
            return x

    _, report = check(Stacked(), torch.randn(2, 5, DIM))
    assert report.count("gain folded") == 12


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


def test_large_weights_are_followed_as_small_ones_are():
    class Left(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(300, 256))

        def forward(self, x):
            return self.weight @ x.mT

    convolutions = nn.Sequential(nn.Conv2d(3, 192, 1), nn.BatchNorm2d(192), nn.Conv2d(192, 96, 3), nn.BatchNorm2d(96),
                                 nn.ReLU())  # fmt: skip
    check(convolutions, torch.randn(2, 3, 5, 5), actions="folded, folded back")
    check(nn.Sequential(make("un(bias=False)", 256), Left()), torch.randn(7, 256), actions="folded")
