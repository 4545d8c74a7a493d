"""Verification in float64: inputs, comparison, and examples that prove nothing."""

import threading
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from fold_cases import DIM, Read, check
from small_models import built
from third_party_models import randomize, tokens
from torch import Tensor, nn

from normkit.fold import audit, fold, rewrite, to_rms
from normkit.models import convert
from normkit.models.difference import error
from normkit.norms import make


class Plain(nn.Sequential):
    """A norm and a layer; `how` changes the output, by the number of the call."""

    def __init__(self, how=lambda y, calls: y, change=lambda model: None):
        super().__init__(make("un", DIM), nn.Linear(DIM, 4))
        self.how, self.calls = how, 0
        change(self.eval())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.how(super().forward(x), self.calls)


def nan(tensor):
    return nn.init.constant_(tensor, float("nan"))


def quantize(model):
    model[1].weight = nn.Parameter(torch.zeros(4, DIM, dtype=torch.int8), requires_grad=False)


def offload(model):
    model.to("meta")[0]._hf_hook = object()  # as accelerate attaches one


X = torch.randn(3, DIM)
ERRORS = {  # models, an example, options, and what the message names
    "no finite output": (Plain(), (nan(torch.empty(3, DIM)),), {}, "finite"),
    "NaN in the output": (Plain(lambda y, _: torch.where(torch.arange(4) == 1, torch.nan, y)), (X,), {}, "NaN"),
    "statistics not finite": (Plain(change=lambda m: nan(m[0].running)), (X,), {}, r"0\.running"),
    "a weight not finite": (Plain(change=lambda m: nan(m[1].bias)), (X,), {}, r"1\.bias"),
    "an empty example": (Plain(), (X[:0],), {}, "example"),
    "a random forward": (Plain(lambda y, _: y + torch.rand(1)), (X,), {}, "random"),
    "a module in training": (Plain(change=lambda m: m[0].train()), (X,), {}, "0.*training"),
    "no norm that can be read": (nn.Sequential(nn.InstanceNorm1d(3)).eval(), (X[:, :3],), {}, "no reader"),
    "quantized weights": (Plain(change=quantize), (X,), {}, "quantize"),
    "an example of another width": (Plain(), (X[:, :5],), {}, r"float32\[3, 5\]"),
    "no example": (Plain(), (), {}, "example"),
    "a lazy module": (nn.Sequential(make("un", DIM), nn.LazyLinear(2)).eval(), (X,), {}, r"1\.weight"),
    "an offloaded model": (Plain(change=offload), (X,), {}, "offload_folder"),
    "no tensor in the output": (Plain(lambda y, _: None), (X,), {}, "tensor"),
    "another output": (Plain(), (X,), {"outputs": lambda out: out.logits}, "outputs="),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_what_cannot_be_folded_or_compared_is_an_error(name):
    model, example, options, words = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=words):
        fold(model, *example, **options)
    if name == "an offloaded model":
        for transform in (audit, to_rms):
            with pytest.raises(ValueError, match=words):
                transform(model, *example)


def test_masked_scores_are_outputs_like_others():
    masked = Read(nn.Linear(DIM, 4), lambda m, y: m.reader(y).masked_fill(torch.arange(4) == 2, -torch.inf))
    check(masked, torch.randn(3, DIM), actions="folded")


@pytest.mark.parametrize("masked", [3, 17])
def test_errors_of_different_outputs(masked):
    assert error(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])) == float("inf")
    assert error(torch.tensor([1]), torch.tensor([2])) == float("inf")
    assert error({"a": torch.ones(2)}, {"b": torch.ones(2)}) == float("inf")
    assert error(torch.tensor([-torch.inf, 1.0]), torch.tensor([-torch.inf, 1.0])) == 0.0
    outputs = torch.randn(4, 20).double()
    outputs[:, :masked] = torch.finfo(torch.float32).min  # masked numbers do not hide an error
    wrong = outputs.clone()
    wrong[:, -1] += 0.5
    assert error(wrong, outputs) > 0.01
    y = torch.tensor([1.0, 2.0, 3.0, -1e9])  # nor do huge ones
    assert error(y + torch.tensor([0.3, 0, 0, 0]), y) == pytest.approx(0.1)
    assert error(y + torch.tensor([0, 0, 0, 1e8]), y) == pytest.approx(0.1)
    assert error(torch.tensor([0.0, 0, 1]), torch.tensor([0.0, 0, 2])) == 0.5


def test_a_wrong_rule_fails_verification_and_the_norm_stays(monkeypatch):
    from normkit.fold.relations import Relations

    pin = Relations.pin
    monkeypatch.setattr(Relations, "pin", lambda self, nodes, why, scale=True: (
        None if "square" in why or "pow" in why else pin(self, nodes, why, scale)))  # fmt: skip
    model = randomize(Read(nn.Linear(DIM, 4), lambda m, y: m.reader(y) * y.square().mean())).eval()
    _, report = fold(model, torch.randn(3, DIM))
    assert report.rows[0].action == "kept"
    assert report.max_error < 1e-12


def test_inputs_longer_than_the_example_are_compared(monkeypatch):
    def forward(m, ids):
        return m.norm(m.words(ids) + m.positions[: ids.shape[1]])

    positions = nn.Parameter(torch.randn(9, DIM))
    model = randomize(built(forward, words=nn.Embedding(20, DIM), positions=positions, norm=make("un", DIM))).eval()
    _, report = fold(model, tokens(2, 5, high=20))
    assert report.rows[0].action == "folded back"
    assert report.tried[-1] == "6 tokens"
    _, report = fold(model, tokens(2, 9, high=20))
    assert "10 tokens" not in report.tried, "the model refuses it"
    monkeypatch.setattr(rewrite, "_of_longer_inputs", lambda table, shape, *changes: list(changes))
    _, report = fold(model, tokens(2, 5, high=20))
    assert report.rows[0].action == "kept"


def test_reasons_name_arguments_that_may_use_idle_weights():
    def forward(m, x, encoder_hidden_states=None, extra=None, use_cache=None, **options):
        y = m.norm(torch.tanh(x))
        given = extra if encoder_hidden_states is None else encoder_hidden_states
        return m.a(y) if given is None else m.a(y) + m.head(y) * given

    parts = {"norm": make("batch", DIM), "a": nn.Linear(DIM, 4), "head": nn.Linear(DIM, 4)}
    model = randomize(built(forward, **parts)).eval()
    why = fold(model, torch.randn(3, 5, DIM))[1].rows[0].why
    assert "head.weight" in why
    assert "encoder_hidden_states or extra" in why
    _, report = fold(model, torch.randn(3, 5, DIM), torch.tensor(2.0))
    assert report.foldable == "1 of 1"
    model.head = None
    assert fold(model, torch.randn(3, 5, DIM))[1].foldable == "1 of 1"


@pytest.mark.parametrize("axis", [0, 1])
def test_a_table_of_positions_that_a_longer_input_makes_again_is_left_alone(axis):
    def made(length):
        return torch.arange(length * DIM).view(length, DIM).cos().unsqueeze(1 - axis)

    def forward(m, ids):
        if ids.shape[1] > m.table.shape[axis]:
            m.table = made(ids.shape[1]).to(m.table)
        x = m.embedding(ids) + m.table.narrow(axis, 0, ids.shape[1]).squeeze(1 - axis)
        return torch.tanh(m.norm(x))

    table = nn.Buffer(made(16), persistent=False)
    model = randomize(built(forward, table=table, embedding=nn.Embedding(9, DIM), norm=make("batch", DIM))).eval()
    folded, report = fold(model, torch.arange(10).view(2, 5) % 9)
    later = torch.arange(40).view(2, 20) % 9
    assert (report.rows[0].action, error(folded(later), model(later)) < 1e-5) == ("multiply-add", True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_eps_of_rmsnorm_stays_that_of_the_models_type(dtype):
    model = nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 3)).to(dtype).eval()
    nn.init.uniform_(model[0].weight, 0.5, 1.5)
    folded, report = fold(model, torch.randn(4, 8).to(dtype))
    x = 1e-4 * torch.randn(4, 8).to(dtype)
    assert [row.action for row in report] == ["gain folded"]
    assert error(folded(x), model(x)) < 10 * torch.finfo(dtype).eps
    assert error(convert(model, "rms")(x), model(x)) < 10 * torch.finfo(dtype).eps


@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0)])
def test_an_output_of_one_number_may_be_multiplied(factor):
    check(Read(nn.Linear(DIM, 1), lambda self, y: self.reader(y) * factor), torch.randn(1, 1, DIM))


@dataclass
class Batch:
    """An input of a model in an object."""

    x: Tensor
    mask: Tensor


@pytest.mark.parametrize("wrap", [Batch, SimpleNamespace, lambda **fields: UserDict(fields)])
def test_tensors_in_objects_are_varied_too(wrap):
    def forward(m, batch):
        given = batch if hasattr(batch, "x") else SimpleNamespace(**batch)
        y = m.norm(torch.tanh(given.x * given.mask[..., None]))
        return m.reader(F.pad(y, (0, 0, 0, -y.shape[1] % 4))).softmax(1)

    batch = wrap(x=torch.randn(2, 8, DIM), mask=torch.ones(2, 8))
    _, report = check(built(forward, norm=make("batch", DIM), reader=nn.Linear(DIM, 4)), batch, actions="add")
    assert report.tried[1:] == ("7 tokens, a batch of 3, masks that mask", "9 tokens")


def test_arguments_that_cannot_be_copied_are_passed_on():
    def forward(m, x, lock):
        with lock:
            return m.reader(m.norm(torch.tanh(x)))

    model = built(forward, norm=make("batch", DIM), reader=nn.Linear(DIM, 4))
    check(model, torch.randn(3, 5, DIM), threading.Lock(), actions="folded")


def test_tensors_that_are_no_buffers_get_float64():
    model = Read(nn.Linear(DIM, 4), lambda m, y: m.reader(y) @ m.matrices[0] @ m.matrices[1])
    model.matrices = [torch.randn(4, DIM), model.reader.weight.T * model.reader.weight.norm()]  # one has a gradient
    check(model, torch.randn(3, 5, DIM), actions="folded")
    assert model.matrices[0].dtype == torch.float32


def test_sparse_buffers_and_inputs():
    def forward(m, x, adjacency):
        return torch.sparse.mm(adjacency, torch.sparse.mm(m.edges, m.reader(m.norm(torch.tanh(x)))))

    model = built(forward, norm=make("batch", DIM), reader=nn.Linear(DIM, 4), edges=nn.Buffer(torch.eye(5).to_sparse()))
    check(model, torch.randn(5, DIM), torch.eye(5).to_sparse(), actions="folded")
