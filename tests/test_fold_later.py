"""Later inputs that take other paths than the example, and weights that the example does not use."""

import re

import pytest
import torch
import torch.nn.functional as F
from fold_cases import DIM, Two, both_agree, both_agree_on, check
from small_models import built
from torch import Tensor, nn

from normkit.fold import fold, to_rms
from normkit.models import convert
from normkit.models.affine import Affine
from normkit.norms import make

X, SOME = torch.randn(2, 5, DIM), torch.arange(10).view(2, 5) % 3 == 0
NONE, LATER_MASK = torch.zeros(2, 5, dtype=torch.bool), torch.arange(10).view(2, 5) > 7


def filled(value):
    return lambda y, a, b, mask: a(y.masked_fill(mask[..., None], value)) + b(y)


def zeroed(y, a, b, lengths):
    y = y.clone()
    for row, length in zip(y, lengths.tolist(), strict=True):
        row[length:] = 0
    return a(y) + b(y)


def branch(idle):
    return lambda y, a, b, mask: a(y) if bool((mask == idle).all()) else a(torch.where((mask == idle)[..., None], y, 0))


def clamped(read):
    return lambda y, a, b: a(y.clamp(-5, 5) if max(read(y.detach().flatten())) > 50 else y) + b(y)


LATER = {  # how the norm's output is used, arguments of the example, later ones, what becomes of the norm
    "a mask that masks nothing yet": (filled(0.0), (X, NONE), (X, SOME), "add"),
    "where that masks nothing yet": (lambda y, a, b, mask: a(torch.where(mask[..., None], y, 0.0)) + b(y),
                                     (X, ~NONE), (X, ~SOME), "multiply-add"),
    "a mask that fills in a tensor of 0": (filled(torch.tensor(0.0)), (X, SOME), (X, ~SOME), "multiply-add"),
    "a mask that fills in a tensor": (filled(torch.tensor(-2.0)), (X, SOME), (X, ~SOME), "multiply-add"),
    "a mask that fills in what the norm gives": (
        lambda y, a, b, mask: a(torch.ones_like(y).masked_fill(mask[..., None], y.mean((0, 1, 2)))) + b(y),
        (X, SOME), (X, ~SOME), "multiply-add"),
    "a branch for a mask of ones": (branch(True), (X, ~NONE), (X, ~LATER_MASK), "multiply-add"),
    "a branch for a mask of zeros": (branch(False), (X, NONE), (X, LATER_MASK), "multiply-add"),
    "zeros behind shorter sequences": (zeroed, (X, torch.tensor([5, 5])), (X, torch.tensor([5, 3])), "multiply-add"),
    "a factor": (lambda y, a, b, f: a(y * f) + b(y), (X, torch.tensor(0.5)), (X, torch.tensor(2.5)), "add"),
    "a factor of 1": (lambda y, a, b, f: a(y * f) + b(y), (X, torch.ones(1)), (X, 3 * torch.ones(1)), "add"),
    "a factor computed from numbers": (lambda y, a, b, ids: a(y * (ids > 2).any()) + b(y),
                                       (X, torch.arange(6).view(2, 3)), (X, torch.ones(2, 3, dtype=torch.long)), "add"),
    "lengths that are all alike": (lambda y, a, b, lengths: a(y / lengths.max().item()) + b(y).mean(),
                                   (X, torch.tensor([5, 5])), (X, torch.tensor([3, 4])), "add"),
    "padding by ones at other sizes": (
        lambda y, a, b: a(F.pad(y, (0, 0, 0, 2 * (y.shape[1] > 9)), value=1.0)) + b(y).sum(),
        (X,), (torch.randn(2, 12, DIM),), "multiply-add"),
    "a result in a given tensor": (
        lambda y, a, b: a(torch.cat([y[:, :1], y], 1, out=y.new_empty(len(y), y.shape[1] + 1, DIM))),
        (torch.randn(2, 7, DIM),), (X,), "multiply-add"),
    "a weight whose rows are one row": (lambda y, a, b: F.linear(y, a.weight[:1].expand(4, DIM)).tanh(),
                                        (torch.randn(2, 7, DIM),), (X,), "multiply-add"),
    "numbers as a list": (clamped(Tensor.tolist), (X,), (1e3 * X,), "multiply-add"),
}  # fmt: skip


@pytest.mark.parametrize("name", LATER)
def test_what_later_inputs_do_with_a_norm(name):
    how, example, later, action = LATER[name]
    both_agree_on(Two(how), example, later, action)


@pytest.mark.parametrize("kind", ["group", "channels", "token"])
def test_an_index_may_pick_what_the_example_does_not(kind):
    def pick(y, a, b, index):
        if kind == "token":
            return a(torch.cat([torch.ones_like(y[:, :1]), y], 1)[torch.arange(len(y)), index])
        return a(y.unflatten(-1, (3, 2))[torch.arange(2), :, index] if kind == "group" else y.index_select(-1, index))

    model, later = Two(pick), {"group": [0, 1], "channels": [3, 5], "token": [0, 1]}[kind]
    model.a, model.b = nn.Linear(DIM if kind == "token" else 2, 4), None
    both_agree_on(model, (X, torch.tensor([2, 2])), (X, torch.tensor(later)), "multiply-add")


def test_padding_that_only_sizes_not_tried_show():
    """Swin's call of `pad` is made where nothing is padded, too.

    None of the sizes tried needs any in every stage.
    """
    from torchvision_stub import load_torchvision

    swin = load_torchvision().models.SwinTransformer([4, 4], 6, [1, 1], [1, 1], [7, 7], num_classes=5)
    model = convert(swin, "un")
    _, report = both_agree_on(model, (torch.randn(1, 3, 56, 56),), (torch.randn(1, 3, 72, 72),))
    norm1 = [row.action for row in report if row.name.endswith("norm1")]
    assert norm1 == ["folded", "folded"]  # the writers of the stream take the shift


class Rows(nn.Module):
    """A norm, zeros that fill an axis up to a multiple of four where it is not one, and a layer."""

    def __init__(self, axis: int, channels: int):
        super().__init__()
        self.norm, self.read, self.axis, self.channels = make("batch", DIM), nn.Linear(DIM, 4), axis, channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(x.movedim(self.channels, -1)))
        y = y.movedim(self.axis, -2)
        if y.shape[-2] % 4:
            y = F.pad(y, (0, 0, 0, -y.shape[-2] % 4))
        return self.read(y).softmax(-2)


@pytest.mark.parametrize(
    ("shape", "axis", "channels"),
    [((2, 8, DIM), 1, -1), ((2, DIM, 8), 1, 1), ((2, 8, 8, DIM), 2, -1), ((2, DIM, 8, 12), 1, 1),
     ((2, 4, 4, 8, DIM), 3, -1)],
    ids=str,
)  # fmt: skip
def test_every_axis_that_may_be_a_length_is_varied(shape, axis, channels):
    later = [n + 3 * (i > 0 and n != DIM) for i, n in enumerate(shape)]
    both_agree_on(Rows(axis, channels), (torch.randn(shape),), (torch.randn(later),), "add")


def test_constant_inputs_can_be_verified():
    two = Two(lambda y, a, b: a(y) if y.var(0).sum() < 1e-9 else b(y * y))
    model = built(lambda m, ids: m.two(m.embed(ids)), embed=nn.Embedding(9, DIM), two=two)
    both_agree_on(model, (torch.zeros(2, 5, dtype=torch.long),), (torch.randint(9, (2, 5)),), "multiply-add")
    both_agree_on(two, (torch.zeros(2, 5, DIM),), (X,), "multiply-add")


def test_a_folded_weight_that_its_type_cannot_hold_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), make("un(eps=1e-12)", 4), nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[1].running.fill_(1e-8)
        model[0].weight.mul_(1e-4), model[0].bias.zero_(), model[2].weight.mul_(30)
    x = torch.randn(3, 4)
    fold(model, x)
    with pytest.raises(RuntimeError, match="float32"):
        fold(model.half(), x.half())


def test_a_norm_that_is_the_whole_model():
    folded, report = fold(make("un", 4).eval(), torch.randn(3, 4))
    assert isinstance(folded, Affine)
    assert [row.action for row in report] == ["multiply-add"]


def test_a_norm_that_is_called_with_a_mask():
    model = built(lambda m, x: m.read(m.norm(torch.tanh(x), mask=None)), norm=make("un", DIM), read=nn.Linear(DIM, 4))
    check(model, torch.randn(2, 7, DIM), actions="folded")


def test_a_view_of_the_bits_of_a_norm_reads_it():
    model = Two(lambda y, a, b: a(y) + b(y) + 1e-9 * (y.view(torch.int32) > 0).sum())
    check(model, torch.randn(2, 5, DIM), actions="multiply-add")


class Slots:
    """An output whose tensor is in no `__dict__`."""

    __slots__ = ("value",)

    def __init__(self, value: Tensor):
        self.value = value


@pytest.mark.parametrize("wrap", [Slots, lambda y: iter([y]), lambda y: [[[[[[[y]]]]]]]])
def test_an_output_that_is_hidden_in_an_object_stays(wrap):
    model = Two(lambda y, a, b: (a(y) + b(y), wrap(y)))
    check(model, torch.randn(2, 5, DIM), actions="multiply-add")
    check(model, torch.randn(2, 5, DIM), actions="folded", outputs=lambda out: out[0])


# -- weights and norms that the example does not use -------------------------------------------------------------------


def by_length(change):
    return lambda y, a, b: (a if y.shape[1] < 50 else b)(change(y))


@pytest.mark.parametrize(
    ("spec", "change", "layer", "action"),
    [
        ("batch", lambda y: y, nn.Linear(DIM, 4), "multiply-add"),
        ("layer", lambda y: y, nn.Linear(DIM, 4), "kept"),
        ("batch", lambda y: y, nn.Linear(DIM, 1), "multiply-add"),
        ("batch", lambda y: y, make("batch", DIM), "multiply-add, kept"),
        ("batch", lambda y: y[..., :4], nn.Linear(4, 4), "multiply-add"),
        ("batch", lambda y: torch.cat([y, y[..., :2].tanh()], -1), nn.Linear(DIM + 2, 4), "multiply-add"),
    ],
)
def test_a_layer_that_no_call_reached_keeps_the_norm_that_it_may_read(spec, change, layer, action):
    model, x, long = Two(by_length(change), spec), torch.randn(2, 7, DIM), torch.randn(2, 60, DIM)
    model.a = nn.Linear(layer.weight.shape[-1], 4)
    model.b = layer
    assert re.search(r"\bb\b", both_agree(model, (x,), (long,), action))


def test_a_layer_that_no_call_reached_keeps_the_centring():
    def forward(m, x):
        x = m.write(x)
        return m.a(m.norm(x)) if x.shape[1] < 50 else m.b(x)

    layers = {"write": nn.Linear(3, DIM), "a": nn.Linear(DIM, 2), "b": nn.Linear(DIM, 2)}
    _, report = to_rms(built(forward, norm=nn.LayerNorm(DIM), **layers).eval(), torch.randn(2, 5, 3))
    assert (report.rows[0].action, "b.weight" in report.rows[0].why) == ("kept", True)


class Options(nn.Module):
    """A post-norm stream; only some calls use a parameter or buffer `w` of the model or of a child."""

    def __init__(self, kind: str, *shape: int):
        super().__init__()
        self.kind, self.child = kind, nn.Module()
        holder = self.child if kind in ("flat", "added", "gain and bias") else self
        holder.w = nn.Buffer(torch.randn(shape)) if kind in ("cat", "added") else nn.Parameter(torch.randn(shape))
        self.write, self.norm, self.again = nn.Linear(DIM, DIM), make("un", DIM), make("un", DIM)
        self.one, self.two, self.read = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 4)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        given, w = z is not None, self.child.w if hasattr(self.child, "w") else self.w
        x = self.write(x)
        x = x + w if given and self.kind == "added" else x
        y = self.norm(x + self.one(x))
        y = self.again(y + self.two(y))
        if self.kind == "stacked":
            return y @ w[int(given)]
        if self.kind == "gain and bias":
            return self.read(y * w[:DIM] + w[DIM:] if given else y)
        if not given or self.kind == "added":
            return self.read(y)
        return torch.cat([y, z], -1) @ w if self.kind == "cat" else y.flatten(1) @ w


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("cat", (2 * DIM, 4)), ("flat", (3 * DIM, 4)), ("stacked", (2, DIM, 4)), ("added", (DIM,)),
     ("gain and bias", (2 * DIM,))],
)  # fmt: skip
def test_weights_that_only_later_calls_use_keep_the_norms_that_they_may_touch(kind, shape):
    x = torch.randn(2, 3, DIM)
    _, report = both_agree_on(Options(kind, *shape), (x,), (x, torch.randn(2, 3, DIM)))
    assert re.search(r"\bw\b", report.rows[-1].why + report.rows[0].why)


def test_a_vector_in_the_place_of_tokens_and_words_by_task():
    def forward(m, ids, masked=None, task=0):
        x = F.embedding(ids, m.words[task])
        x = x if masked is None else torch.where(masked[..., None], m.token, x)
        x = m.first(x)
        return m.last(x + m.one(x))

    ids, masked = torch.randint(0, 5, (2, 7)), torch.arange(7) % 2 == 0
    masked = masked.expand(2, 7)
    for example in ((ids,), (ids, masked)):
        for later in ((ids, masked), (ids, None, 1)):
            model = built(
                forward, words=nn.Parameter(torch.randn(2, 5, DIM)), token=nn.Parameter(torch.randn(DIM)),
                first=make("un", DIM), last=make("un", DIM), one=nn.Linear(DIM, DIM),
            )  # fmt: skip
            both_agree_on(model, example, later)


@pytest.mark.parametrize("how", ["mask", "add"])
def test_an_expert_that_was_called_without_rows_keeps_the_norm(how):
    """Experts of ranges of words, each called with all of its rows, often none."""

    def forward(m, ids):
        y, out = m.norm(torch.tanh(m.words(ids))).flatten(0, 1), torch.zeros(ids.numel(), DIM)
        for number, expert in enumerate(m.experts):
            rows = ids.flatten() // 10 == number
            if how == "mask":
                out[rows] = expert(y[rows])
            else:
                out.index_add_(0, rows.nonzero().flatten(), expert(y[rows]))
        return out

    def model():
        experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        return built(forward, words=nn.Embedding(40, DIM), norm=make("un", DIM), experts=experts)

    few, all_ids = torch.tensor([[3, 15, 17], [0, 11, 19]]), torch.arange(40)[None]
    _, report = both_agree_on(model(), (few,), (all_ids,), "multiply-add")
    assert "experts.2.weight" in report.rows[0].why
    both_agree_on(model(), (all_ids,), (few,), "folded")


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
    """A norm whose output changes in the rows of one word."""

    def forward(m, ids):
        x = torch.tanh(m.words(ids.flatten()))
        y = change(m.norm(x), x, ids.flatten() == 8, m.b)
        return m.a(y).sum(0) + torch.tanh(m.b(x)).sum()

    def model():
        return built(
            forward, words=nn.Embedding(9, DIM), norm=make("batch", DIM), a=nn.Linear(DIM, 4), b=nn.Linear(DIM, DIM)
        )

    none, some = torch.arange(10).view(2, 5) % 7, torch.arange(18).view(2, 9) % 9
    both_agree_on(model(), (none,), (some,), "multiply-add")
    both_agree_on(model(), (some,), (none,))


def test_a_layer_that_later_calls_apply_to_other_rows_keeps_the_norm():
    def other_rows(y, a, b, z, mask):
        return (a(y) + b(y)).sum(1) + a(torch.tanh(z[mask])).sum(0)

    x, z = torch.randn(2, 5, DIM), torch.randn(3, DIM)
    none, some = torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, True])
    why = both_agree(Two(other_rows), (x, z, none), (x, z, some), "multiply-add")
    assert "a.weight" in why
