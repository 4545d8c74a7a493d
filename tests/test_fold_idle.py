"""Weights and norms that the example does not use: norms that they may touch later stay."""

import pytest
import torch
import torch.nn.functional as F
from fold_cases import DIM, Two, both_agree, both_agree_on, check
from torch import Tensor, nn

from normkit.fold import to_rms
from normkit.norms import make


@pytest.mark.parametrize(("spec", "action"), [("batch", "multiply-add"), ("layer", "kept")])
def test_a_layer_that_no_call_reached_keeps_the_norm_that_it_may_read(spec, action):
    def by_length(y, a, b):
        return a(y) if y.shape[1] < 50 else b(y)

    x, long = torch.randn(2, 7, DIM), torch.randn(2, 60, DIM)
    why = both_agree(Two(by_length, spec), (x,), (long,), action)
    assert "no call that was tried used b.weight" in why
    assert both_agree(Two(lambda y, a, b: a(y) + b(y)), (x,), (long,), "folded") == ""


def test_a_row_of_an_embedding_that_a_sum_reads_is_in_use():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.norm, self.a = nn.Embedding(3, DIM), make("batch", DIM), nn.Linear(DIM, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.norm(x + self.rows.weight[1]))

    check(Rows(), torch.randn(2, 7, DIM), actions="folded")


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


class Options(nn.Module):
    """A post-norm stream whose weight `w` only some calls use."""

    def __init__(self, kind: str, *shape: int):
        super().__init__()
        self.kind, self.w = kind, nn.Parameter(torch.randn(shape))
        self.write, self.norm, self.again = nn.Linear(DIM, DIM), make("un", DIM), make("un", DIM)
        self.one, self.two, self.read = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 4)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        given = z is not None
        x = self.write(x)
        x = x + self.w if given and self.kind == "added" else x
        y = self.norm(x + self.one(x))
        y = self.again(y + self.two(y))
        if self.kind == "stacked":
            return y @ self.w[int(given)]
        if not given or self.kind == "added":
            return self.read(y)
        return torch.cat([y, z], -1) @ self.w if self.kind == "cat" else y.flatten(1) @ self.w


@pytest.mark.parametrize(
    ("kind", "shape"), [("cat", (2 * DIM, 4)), ("flat", (3 * DIM, 4)), ("stacked", (2, DIM, 4)), ("added", (DIM,))]
)
def test_weights_that_only_later_calls_use_keep_the_norms_that_they_may_touch(kind, shape):
    x = torch.randn(2, 3, DIM)
    _, report = both_agree_on(Options(kind, *shape), (x,), (x, torch.randn(2, 3, DIM)))
    assert "no call that was tried used" in report.rows[-1].why + report.rows[0].why


class Beside(nn.Module):
    """A norm whose output some calls change by a parameter of the same module or of a child."""

    def __init__(self, how, spec: str, vector: Tensor, child: bool):
        super().__init__()
        self.norm, self.read, self.how = make(spec, DIM), nn.Linear(DIM, 4), how
        self.child = nn.Module() if child else None
        owner = self.child or self
        owner.g = vector if isinstance(vector, nn.Parameter) else nn.Buffer(vector)

    def forward(self, x: Tensor, changed: Tensor | None = None) -> Tensor:
        y = self.norm(torch.tanh(x))
        return self.read(y if changed is None else self.how(y, (self.child or self).g))


@pytest.mark.parametrize("spec", ["batch", "layer"])
@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize("kind", [nn.Parameter, Tensor.clone])
@pytest.mark.parametrize("how", [torch.mul, torch.add, torch.matmul])
def test_a_gain_a_bias_or_a_matrix_that_only_later_calls_use_keeps_the_norm(how, kind, child, spec):
    x, vector = torch.randn(2, 3, DIM), kind(torch.rand(DIM, DIM) if how is torch.matmul else torch.rand(DIM))
    actions = "multiply-add" if spec == "batch" else "kept"
    _, report = both_agree_on(Beside(how, spec, vector, child), (x,), (x, torch.ones(1)), actions)
    assert "no call that was tried used" in report.rows[0].why


class MaskToken(nn.Module):
    """A vector that takes the place of some tokens, before the first norm; words by task."""

    def __init__(self):
        super().__init__()
        self.words, self.token = nn.Parameter(torch.randn(2, 5, DIM)), nn.Parameter(torch.randn(DIM))
        self.first, self.last, self.one = make("un", DIM), make("un", DIM), nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor, masked: Tensor | None = None, task: int = 0) -> Tensor:
        x = F.embedding(ids, self.words[task])
        x = x if masked is None else torch.where(masked[..., None], self.token, x)
        x = self.first(x)
        return self.last(x + self.one(x))


def test_a_vector_in_the_place_of_tokens_and_words_by_task():
    ids, masked = torch.randint(0, 5, (2, 7)), torch.arange(7) % 2 == 0
    masked = masked.expand(2, 7)
    for example in ((ids,), (ids, masked)):
        for later in ((ids, masked), (ids, None, 1)):
            both_agree_on(MaskToken(), example, later)


class Experts(nn.Module):
    """Experts of ranges of words, each called with all of its rows, often none."""

    def __init__(self):
        super().__init__()
        self.words, self.norm = nn.Embedding(40, DIM), make("un", DIM)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, ids: Tensor, how: str = "mask") -> Tensor:
        y, out = self.norm(torch.tanh(self.words(ids))).flatten(0, 1), torch.zeros(ids.numel(), DIM)
        for number, expert in enumerate(self.experts):
            rows = ids.flatten() // 10 == number
            if how == "mask":
                out[rows] = expert(y[rows])
            else:
                out.index_add_(0, rows.nonzero().flatten(), expert(y[rows]))
        return out


@pytest.mark.parametrize("how", ["mask", "add"])
def test_an_expert_that_was_called_without_rows_keeps_the_norm(how):
    few, all_ids = torch.tensor([[3, 15, 17], [0, 11, 19]]), torch.arange(40)[None]
    _, report = both_agree_on(Experts(), (few, how), (all_ids, how), "multiply-add")
    assert "no call that was tried used experts.2.weight" in report.rows[0].why
    both_agree_on(Experts(), (all_ids, how), (few, how), "folded")


def test_a_vector_of_a_gain_and_a_bias_that_only_later_calls_use_keeps_the_norm():
    both = nn.Parameter(torch.rand(2 * DIM) + 0.5)
    model = Two(lambda y, a, b, *z: a(y * both[:DIM] + both[DIM:] if z else y) + b(y))
    model.both = both
    both_agree(model, (torch.randn(2, 3, DIM),), (torch.randn(2, 3, DIM), torch.ones(1)), "multiply-add")


def test_a_norm_that_no_call_reached_keeps_the_norm_beside_it():
    model = Two(lambda y, a, b: a(y if y.shape[1] < 50 else b(y)))
    model.b = make("batch", DIM)
    x, long = torch.randn(2, 7, DIM), torch.randn(2, 60, DIM)
    assert "no call that was tried used b, which may" in both_agree(model, (x,), (long,), "multiply-add, kept")


@pytest.mark.parametrize("part", [True, False])
def test_an_unused_layer_like_one_that_reads_a_part_or_more_keeps_the_norm(part):
    def by_length(y, a, b):
        y = y[..., :4] if part else torch.cat([y, y[..., :2].tanh()], -1)
        return a(y) if y.shape[1] < 50 else b(y)

    model = Two(by_length)
    model.a, model.b = (nn.Linear(4 if part else DIM + 2, 5) for _ in range(2))
    why = both_agree(model, (torch.randn(2, 7, DIM),), (torch.randn(2, 60, DIM),), "multiply-add")
    assert "no call that was tried used b.weight" in why


def test_an_unused_layer_of_one_output_keeps_the_norm():
    model = Two(lambda y, a, b: a(y) if y.shape[1] < 50 else b(y))
    model.norm, model.b = nn.Sequential(model.norm), nn.Linear(DIM, 1)
    x, long = torch.randn(2, 7, DIM), torch.randn(2, 60, DIM)
    assert "no call that was tried used b.weight" in both_agree(model, (x,), (long,), "multiply-add")


class Selected(nn.Module):
    """A norm whose output changes in the rows of one word."""

    def __init__(self, change):
        super().__init__()
        self.words, self.norm, self.change = nn.Embedding(9, DIM), make("batch", DIM), change
        self.a, self.b = nn.Linear(DIM, 4), nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.words(ids.flatten()))
        y = self.change(self.norm(x), x, ids.flatten() == 8, self.b)
        return self.a(y).sum(0) + torch.tanh(self.b(x)).sum()


def put(value):
    def change(y, x, mask, b):
        y = y.clone()
        rows = mask.nonzero().flatten()
        y[rows] = value(y[rows], x[rows], b)
        return y

    return change


@pytest.mark.parametrize("change", [
    put(lambda y, x, b: 0.0),
    put(lambda y, x, b: torch.tanh(y)),
    put(lambda y, x, b: b(x)),
    lambda y, x, mask, b: y.index_fill(0, mask.nonzero().flatten(), 0.0),
    lambda y, x, mask, b: y.masked_scatter(mask[:, None], torch.tanh(y[mask])),
    lambda y, x, mask, b: torch.cat([y, x[mask]]),
])  # fmt: skip
def test_rows_that_only_later_calls_select_keep_the_norm(change):
    none, some = torch.arange(10).view(2, 5) % 7, torch.arange(18).view(2, 9) % 9
    _, report = both_agree_on(Selected(change), (none,), (some,), "multiply-add")
    assert "had no rows in the example" in report.rows[0].why
    both_agree_on(Selected(change), (some,), (none,))


def test_a_layer_that_later_calls_apply_to_other_rows_keeps_the_norm():
    def other_rows(y, a, b, z, mask):
        return (a(y) + b(y)).sum(1) + a(torch.tanh(z[mask])).sum(0)

    x, z = torch.randn(2, 5, DIM), torch.randn(3, DIM)
    none, some = torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, True])
    why = both_agree(Two(other_rows), (x, z, none), (x, z, some), "multiply-add")
    assert "a.weight is also read by aten.addmm, which had no rows in the example" in why


def test_a_row_of_an_embedding_that_only_later_calls_put_into_a_stream():
    class Words(nn.Module):
        def __init__(self):
            super().__init__()
            self.stream, self.words, self.norm = nn.Embedding(9, DIM), nn.Embedding(9, DIM), make("batch", DIM)
            self.a, self.b = nn.Linear(DIM, 4), nn.Linear(DIM, 4)

        def forward(self, ids: Tensor) -> Tensor:
            x = torch.where((ids == 8)[..., None], self.words.weight[3], self.stream(ids))
            return self.a(torch.tanh(x)) + self.b(torch.sigmoid(self.norm(self.words(ids))))

    none, some = torch.arange(10).view(2, 5) % 7, torch.arange(18).view(2, 9) % 9
    both_agree_on(Words(), (none,), (some,), "multiply-add")
