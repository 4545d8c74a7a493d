"""Later inputs that take other paths than the example: the folded model is right there."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from fold_cases import DIM, Two, both_agree, both_agree_on, check
from torch import Tensor, nn

from normkit.fold import fold, to_rms
from normkit.fold.inputs import variants
from normkit.models import convert
from normkit.models.affine import Affine
from normkit.models.difference import error
from normkit.models.invoke import Call
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
    "numbers as an array": (clamped(Tensor.numpy), (X,), (1e3 * X,), "multiply-add"),
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


@pytest.mark.parametrize("masked", [0, 5])
def test_a_mask_of_single_elements(masked):
    layer = nn.Linear(DIM, DIM)
    model = Two(lambda y, a, b, mask: torch.tanh(a(y.masked_fill(mask, 0.0))))
    model.norm, model.b = nn.Sequential(layer, model.norm), nn.Identity()
    x, mask = torch.randn(2, 5, DIM), torch.arange(60).view(2, 5, DIM) % 7 * 10 >= 70 - masked
    both_agree_on(model, (x, mask), (x, torch.rand(2, 5, DIM) > 0.5))


def test_a_mask_that_has_masked_one_of_two_inputs():
    class Modalities(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms, self.reads = (nn.ModuleList(make() for _ in "ab") for make in (make_norm, make_layer))

        def forward(self, x, mask):
            y = torch.cat([norm(torch.tanh(part)) for norm, part in zip(self.norms, x.split(3, 1), strict=True)], 1)
            parts = y.masked_fill(mask[..., None], 0.0).split(3, 1)
            return sum(torch.tanh(read(part)) for read, part in zip(self.reads, parts, strict=True))

    make_norm, make_layer = partial(make, "batch", DIM), partial(nn.Linear, DIM, 4)
    x, mask = torch.randn(2, 6, DIM), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    both_agree_on(Modalities(), (x, mask), (x, mask.flip(1)))


def test_padding_of_pictures_that_are_not_square():
    def windows(y, a, b):
        y = F.pad(y, (0, 0, 0, y.shape[2] % 2, 0, y.shape[1] % 2))
        return a(y[:, ::2, ::2]) + b(y[:, 1::2, 1::2])

    class Pictures(Two):
        def forward(self, x):
            return super().forward(x.permute(0, 2, 3, 1))

    example, later = torch.randn(2, DIM, 12, 20), torch.randn(2, DIM, 13, 21)
    both_agree(Pictures(windows), (example,), (later,), "add")


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
    """A norm, then zeros that fill an axis up to a multiple of four where it is not one.

    Then a layer.
    """

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
    [
        ((2, 8, DIM), 1, -1),
        ((2, DIM, 8), 1, 1),
        ((2, 8, 8, DIM), 2, -1),
        ((2, DIM, 8, 12), 1, 1),
        ((2, 4, 4, 8, DIM), 3, -1),
    ],
    ids=str,
)
def test_every_axis_that_may_be_a_length_is_varied(shape, axis, channels):
    later = [n + 3 * (i > 0 and n != DIM) for i, n in enumerate(shape)]
    both_agree_on(Rows(axis, channels), (torch.randn(shape),), (torch.randn(later),), "add")


def test_sound_is_as_long_as_it_is():
    class Frames(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = Rows(1, -1)

        def forward(self, sound: Tensor) -> Tensor:
            return self.rows(F.pad(sound, (0, -sound.shape[1] % DIM)).unflatten(1, (-1, DIM)))

    both_agree_on(Frames(), (torch.randn(2, 8 * DIM),), (torch.randn(2, 9 * DIM),), "add")


def test_constant_inputs_can_be_verified():
    class Ids(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.two = (
                nn.Embedding(9, DIM),
                Two(lambda y, a, b: a(y) if y.var(0).sum() < 1e-9 else b(y * y)),
            )

        def forward(self, ids: Tensor) -> Tensor:
            return self.two(self.embed(ids))

    both_agree_on(Ids(), (torch.zeros(2, 5, dtype=torch.long),), (torch.randint(9, (2, 5)),), "multiply-add")
    calls = variants(nn.Linear(DIM, 2), Call((torch.zeros(2, DIM),), {}))
    assert all(call[0][0].std() > 0.5 for call in calls.values())


def test_experts_of_hugging_face_models_fold():
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=2, head_dim=8,
    )  # fmt: skip
    model = convert(transformers.MixtralForCausalLM(config), "un").eval()
    _, report = fold(model, torch.randint(40, (2, 9)), outputs=lambda out: out.logits, use_cache=False)
    assert report.count("folded", "multiply-add") == 3


def test_a_folded_weight_that_its_type_cannot_hold_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), make("un(eps=1e-12)", 4), nn.Linear(4, 4)).eval()
    with torch.no_grad():
        model[1].running.fill_(1e-8)
        model[0].weight.mul_(1e-4), model[0].bias.zero_(), model[2].weight.mul_(30)
    x = torch.randn(3, 4)
    fold(model, x)
    with pytest.raises(RuntimeError, match=r"Transform it in float32: model.float\(\)"):
        fold(model.half(), x.half())


def test_a_norm_that_is_the_whole_model():
    folded, report = fold(make("un", 4).eval(), torch.randn(3, 4))
    assert isinstance(folded, Affine)
    assert [row.action for row in report] == ["multiply-add"]


def test_a_layer_that_ignores_its_bias_gets_none():
    class Weights(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight)

    layer = Weights(DIM, DIM, bias=False)
    model = nn.Sequential(make("batch", DIM), layer)
    model[0].running.copy_(torch.rand(2, DIM) + 0.5)
    folded, report = fold(model.double().eval(), torch.randn(4, DIM).double(), outputs=lambda y: y.argmax(-1))
    x = torch.randn(99, DIM).double()
    assert [row.action for row in report] == ["add"]
    assert (folded(x).argmax(-1) == model(x).argmax(-1)).all()


@pytest.mark.parametrize("masked", [3, 17])
def test_masked_numbers_do_not_hide_an_error(masked):
    outputs = torch.randn(4, 20).double()
    outputs[:, :masked] = torch.finfo(torch.float32).min
    wrong = outputs.clone()
    wrong[:, -1] += 0.5
    assert error(wrong, outputs) > 0.01


def test_huge_numbers_do_not_hide_an_error():
    y = torch.tensor([1.0, 2.0, 3.0, -1e9])
    assert error(y + torch.tensor([0.3, 0, 0, 0]), y) == pytest.approx(0.1)
    assert error(y + torch.tensor([0, 0, 0, 1e8]), y) == pytest.approx(0.1)
    assert error(torch.tensor([0.0, 0, 1]), torch.tensor([0.0, 0, 2])) == 0.5


class Twice(nn.Module):
    """One norm under two names, called with a mask."""

    def __init__(self, norm: nn.Module, **kwargs):
        super().__init__()
        self.write, self.a, self.b, self.kwargs = nn.Linear(DIM, DIM), norm, norm, kwargs
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.write(x)
        x = x + self.one(self.a(x, **self.kwargs))
        return self.two(self.b(x, **self.kwargs))


def test_a_norm_with_two_names_that_is_called_with_a_mask():
    x, mask = torch.randn(2, 7, DIM), torch.rand(2, 7) > 0.5
    folded, _ = check(Twice(make("un", DIM), mask=None), x, actions="folded")
    assert type(folded.a) is type(folded.b) is not nn.Identity, "it takes the mask"
    check(Twice(make("un", DIM)), x, actions="folded")
    rms, _ = to_rms(Twice(nn.LayerNorm(DIM)).eval(), x)
    assert rms.a is rms.b
    assert "rms" in rms.a.spec
    assert folded.a(x, mask) is x


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


def test_rows_of_a_table_that_only_larger_pictures_read():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.norm, self.head = nn.Conv2d(3, DIM, 1), make("un", DIM), nn.Linear(DIM, 3)
            self.positions = nn.Parameter(torch.randn(2, 64, DIM))

        def forward(self, x):
            y = self.patches(x).permute(0, 2, 3, 1)
            y = y + self.positions[0, : y.shape[1], None] + self.positions[1, None, : y.shape[2]]
            return self.head(F.gelu(self.norm(y)))

    model = Rows().double().eval()
    model.norm.running.copy_(torch.rand(1, DIM) + 0.5)
    folded, report = fold(model, torch.randn(2, 3, 8, 12).double())
    x = torch.randn(2, 3, 60, 64).double()
    assert [row.action for row in report] == ["folded back"]
    assert error(folded(x), model(x)) < 1e-12
