"""Norms fold away and nothing changes.

Tested on models of four libraries, every kind of reader, and difficult cases.
"""

import pytest
import torch
import torch.nn.functional as F
from fold_cases import DIM, Read, Tied, check
from third_party_models import CASES, case_of, randomize, tokens
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models import convert
from normkit.models.affine import Affine
from normkit.norms import NORMS, Norm, make

# -- foreign models ---------------------------------------------------------------------------------------------------

STAY = {"torch_encoder_post": 1, "torch_encoder_pre": 1}  # the model's input or output fixes both of their ends


@pytest.mark.parametrize("untie", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize("name", CASES)
def test_offline_norms_fold_out_of_models_that_others_wrote(name, untie):
    case = case_of(name)
    model = randomize(convert(case.model, "batch", mask_from=case.mask_from)).eval()
    folded, report = fold(model, *case.args, outputs=case.outputs, untie=untie, **case.kwargs)
    assert report.foldable == f"{len(report) - STAY.get(name, 0)} of {len(report)}", str(report)
    assert report.max_error < 1e-12
    assert report.native_error < 1e-5
    assert not any(isinstance(module, Norm) for module in folded.modules())
    assert not folded._forward_pre_hooks
    assert len(report.tried) >= 2


@pytest.mark.parametrize("name", [name for name in CASES if name != "hf_resnet"])  # its norms are offline ones
def test_gains_and_biases_of_online_norms_fold_too(name):
    case = case_of(name)
    folded, report = fold(
        case.model, *case.args, outputs=case.outputs, untie=True, keep_architecture=False, **case.kwargs
    )
    assert report.max_error < 1e-12
    assert report.count("gain folded") + report.count("kept") == len(report)
    for row in report:
        site = folded.get_submodule(row.name)
        if row.action == "gain folded":
            assert not list(site.parameters())
            assert "LayerNorm" in str(site) or "RMSNorm" in str(site)
        else:
            assert row.why
    if name not in ("torch_encoder_post", "bart", "marian"):
        assert report.count("gain folded")


@pytest.mark.parametrize("spec", [name for name in NORMS if name != "group"])
def test_every_norm_of_ours_folds_as_far_as_it_can(spec):
    model = nn.Sequential(
        nn.Linear(4, 8), nn.ReLU(), make("power(groups=2)" if spec == "power" else spec, 8), nn.Linear(8, 3)
    )
    if spec == "nonorm":
        model[2] = make("nonorm(affine=True)", 8)
    _, report = check(model, torch.randn(5, 4))
    _, scale, shift = model[2].split()
    gain = bool((scale != 1).any() or (shift != 0).any())
    assert [row.action for row in report] == ["folded" if model[2].offline else "gain folded" if gain else "kept"]


# -- one reader of each kind ------------------------------------------------------------------------------------------


def test_a_linear_without_bias_gets_one():
    folded, report = check(Read(nn.Linear(DIM, 4, bias=False)), torch.randn(3, DIM), actions="folded")
    assert folded.reader.bias.shape == (4,)
    assert report.saved == 2 * DIM - 4


def test_non_contiguous_input_and_single_vectors_are_followed():
    check(Read(nn.Linear(DIM, 4), lambda m, y: m.reader(y.transpose(0, 1))), torch.randn(3, 5, DIM), actions="folded")
    check(Read(nn.Linear(DIM, 4), lambda m, y: m.reader(y[0, 0])), torch.randn(3, 5, DIM), actions="folded")


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_folds_into_patch_convolutions_with_groups(bias):
    conv = nn.Conv2d(DIM, 8, 2, stride=2, groups=2, bias=bias)
    model = Read(conv, lambda m, y: m.reader(y.movedim(-1, 1)).flatten(1))
    check(model, torch.randn(3, 4, 4, DIM), actions="folded")
    check(
        Read(nn.Conv1d(DIM, 4, 1), lambda m, y: m.reader(y.transpose(1, 2))), torch.randn(3, 7, DIM), actions="folded"
    )


def test_a_convolution_that_pads_takes_the_gain_and_leaves_the_shift():
    model = Read(nn.Conv1d(DIM, 4, 3, padding=1), lambda m, y: m.reader(y.transpose(1, 2)))
    folded, _ = check(model, torch.randn(3, 7, DIM), actions="add")
    assert folded.norm.weight is None
    without_shift = Read(nn.Conv1d(DIM, 4, 3, padding=1), lambda m, y: m.reader(y.transpose(1, 2)), "un(bias=False)")
    check(without_shift, torch.randn(3, 7, DIM), actions="folded")
    online = Read(nn.Conv1d(DIM, 4, 3, padding=1), lambda m, y: m.reader(y.transpose(1, 2)), "layer")
    _, report = check(online, torch.randn(3, 7, DIM), actions="kept")
    assert "zero padding" in report.rows[0].why


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_padding_that_repeats_elements_takes_the_shift_too(mode):
    conv = nn.Conv1d(DIM, 4, 3, padding=1, padding_mode=mode)
    check(Read(conv, lambda m, y: m.reader(y.transpose(1, 2))), torch.randn(3, 7, DIM), actions="folded")


def test_zero_padding_that_only_other_sizes_show_is_found():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.reader = make("batch", DIM), nn.Linear(DIM, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            y = F.pad(y, (0, 0, 0, -y.shape[1] % 4))  # none for the example, one row for the others
            return self.reader(y).softmax(1)

    _, report = check(Windows(), torch.randn(3, 8, DIM), actions="add")
    assert report.tried == ("the example", "7 tokens, a batch of 2", "9 tokens")


def test_a_size_that_never_changes_needs_no_care_for_padding():
    case = case_of("hf_swin")
    model = randomize(convert(case.model, "batch")).eval()
    _, report = fold(model, outputs=case.outputs, other_shapes=False, **case.kwargs)
    assert report.foldable == "7 of 7"
    assert not any("pixels" in tried for tried in report.tried)


def test_one_norm_may_feed_queries_keys_values_and_cross_attention():
    class Cross(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.norm, self.memory_norm = make("batch", 8), make("un", 8)
            self.self_attn = nn.MultiheadAttention(8, 2, batch_first=True, **options)
            self.cross_attn = nn.MultiheadAttention(8, 2, batch_first=True, **options)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            y, memory = self.norm(x), self.memory_norm(torch.tanh(memory))
            return self.self_attn(y, y, y, need_weights=False)[0] + self.cross_attn(y, memory, memory)[0]

    example = torch.randn(2, 5, 8), torch.randn(2, 7, 8)
    for options in ({}, {"bias": False}):
        folded, _ = check(Cross(**options), *example, actions="folded, folded")
        assert folded.self_attn.in_proj_bias.shape == (24,)


def test_separate_widths_of_keys_and_values():
    class Cross(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.other = make("batch", 8), make("batch", DIM)
            self.attention = nn.MultiheadAttention(8, 2, kdim=DIM, vdim=DIM, bias=False, batch_first=True)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            memory = self.other(memory)
            return self.attention(self.norm(x), memory, memory)[0]

    check(Cross(), torch.randn(2, 5, 8), torch.randn(2, 7, DIM), actions="folded, folded")


def test_gate_and_up_and_half_of_the_channels_each():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.gate, self.up = make("batch", DIM), nn.Linear(DIM, 8), nn.Linear(DIM, 8, bias=False)
            self.left, self.right = nn.Linear(2, 8), nn.Linear(4, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            left, right = y.split([2, 4], -1)
            return F.silu(self.gate(y)) * self.up(y) + self.left(left) + self.right(right.flip(-1))

    check(Gated(), torch.randn(3, 5, DIM), actions="folded")


def test_two_norms_side_by_side_and_all_tokens_at_once():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = make("batch", 4), make("layer", 2)
            self.reader, self.head = nn.Linear(4 + 2 + 3, 5), nn.Linear(4 * 7, 2)

        def forward(self, x: Tensor) -> Tensor:
            a = self.a(x[..., :4])
            y = torch.cat([a, torch.tanh(x[..., 6:]), self.b(x[..., 4:6])], -1)
            return self.reader(y).mean(1) @ torch.ones(5, 2) + self.head(a.flatten(1))

    folded, _ = check(Beside(), torch.randn(3, 7, 9), actions="folded, gain folded")
    assert isinstance(folded.a, nn.Identity)


def test_functional_use_of_weights_is_followed_where_its_bias_is():
    functional = Read(nn.Linear(DIM, 4), lambda m, y: F.linear(y, m.reader.weight, m.reader.bias))
    check(functional, torch.randn(3, DIM), actions="folded")
    no_bias = Read(nn.Linear(DIM, 4, bias=False), lambda m, y: F.linear(y, m.reader.weight))
    _, report = check(no_bias, torch.randn(3, DIM), actions="add")
    assert "outside its own layer's forward" in report.rows[0].why
    ignored = Read(nn.Linear(DIM, 4), lambda m, y: F.linear(y, m.reader.weight) * 2)
    check(ignored, torch.randn(3, DIM), actions="add")


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda m, y: m.reader(y) + m.reader.weight.sum(), "also read by aten.sum"),
        (lambda m, y: m.reader(y) + F.linear(torch.ones_like(y), m.reader.weight), "used in several places"),
        (lambda m, y: F.linear(y, m.reader.weight.clone(), m.reader.bias), "read by aten.addmm"),
        (lambda m, y: F.linear(y, torch.cat([m.reader.weight, m.reader.weight])), "read by aten.mm"),
        (lambda m, y: m.reader(y) + F.pad(m.reader.bias, (0, 0)).tanh(), "also read by"),
        (lambda m, y: m.reader(y) * y.mean(), "read by aten.mean"),
        (lambda m, y: m.reader(y) + (1.0 if y.sum() > 0 else -1.0), "read by aten.sum"),
        (lambda m, y: m.reader(y + 1), "read by aten.add"),
        (lambda m, y: m.reader(y.relu_()), "read by aten.relu_"),
        (lambda m, y: (m.reader(y), y), "read by the model output"),
        (lambda m, y: m.reader(torch.cat([y, torch.ones_like(y)])), "rows of different origin"),
        (lambda m, y: m.reader(y) + m.reader(y.flip(-1)), "for different inputs"),
        (lambda m, y: m.reader(torch.where(torch.arange(DIM) > 2, y, 1.0)), ""),
    ],
)
def test_other_readers_of_the_norm_or_the_weight_keep_the_norm(forward, why):
    model = Read(nn.Linear(DIM, 4), forward)
    _, report = check(model, torch.randn(3, DIM))
    assert why in report.rows[0].why
    if why:
        assert report.rows[0].action == ("add" if "bias" in report.rows[0].why else "multiply-add")


def test_a_norm_that_something_keeps_is_not_folded():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.reader, self.last = make("batch", DIM), nn.Linear(DIM, 4), None

        def forward(self, x: Tensor) -> Tensor:
            self.last = self.norm(x)
            return self.reader(self.last)

    _, report = check(Keeps(), torch.randn(3, DIM), actions="multiply-add")
    assert "keeps it after the forward" in report.rows[0].why


def test_user_hooks_get_the_same_values():
    model = Read(nn.Linear(DIM, 4))
    model.norm.register_forward_hook(lambda module, args, out: None)
    _, report = check(model, torch.randn(3, DIM), actions="kept")
    assert "hooks" in report.rows[0].why


# -- backwards --------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A norm whose output feeds a residual: it can only go back into what writes its input."""

    def __init__(self, before: nn.Module, forward=None, spec: str = "batch"):
        super().__init__()
        self.before, self.norm, self.after, self._forward = before, make(spec, DIM), nn.Linear(DIM, DIM), forward

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.before(x) if self._forward is None else self._forward(self, x))
        return y + torch.tanh(self.after(y))


@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_goes_back_into_a_linear_and_into_a_convolution(bias):
    check(Residual(nn.Linear(4, DIM, bias=bias)), torch.randn(3, 4), actions="folded back")
    patches = Residual(nn.Conv2d(3, DIM, 2, 2, bias=bias), lambda m, x: m.before(x).flatten(2).transpose(1, 2))
    check(patches, torch.randn(2, 3, 4, 4), actions="folded back")


def test_norm_folds_backward_into_embeddings_and_class_token():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.types, self.norm = (
                nn.Embedding(50, DIM, padding_idx=0),
                nn.Embedding(2, DIM),
                make("batch", DIM),
            )
            self.cls, self.positions = nn.Parameter(torch.randn(1, 1, DIM)), nn.Parameter(torch.randn(1, 20, DIM))
            self.after = nn.Linear(DIM, DIM)

        def forward(self, ids: Tensor, types: Tensor) -> Tensor:
            x = self.words(ids) * DIM**0.5 + self.types(types)
            x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1)
            y = self.norm(x + self.positions[:, : x.shape[1]])
            return y + self.after(y)

    model = Embedded()
    folded, report = check(model, tokens(3, 7), torch.zeros(3, 7, dtype=torch.long), actions="folded")
    assert set(report.rows[0].into) == {"words", "types", "cls", "positions", "after"}
    assert isinstance(folded.norm, nn.Identity)
    for length in (1, 8, 19):  # positions that the example did not reach
        given = tokens(2, length), torch.zeros(2, length, dtype=torch.long)
        torch.testing.assert_close(folded.eval()(*given), model.eval()(*given), rtol=1e-4, atol=1e-5)


def test_an_online_norm_or_another_reader_of_its_input_keeps_a_norm_where_it_is():
    _, report = check(Residual(nn.Linear(4, DIM), spec="layer"), torch.randn(3, 4), actions="kept")
    assert "something that is no layer's output" in report.rows[0].why
    model = Residual(nn.Linear(4, DIM), lambda m, x: (h := m.before(x)) + 0 * h.tanh())
    check(model, torch.randn(3, 4), actions="multiply-add")
    _, report = check(Residual(nn.Identity()), torch.randn(3, 4, DIM), actions="multiply-add")
    assert "the model input" in report.rows[0].why


def test_forwards_and_backwards_meet_in_one_layer():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.second = make("un", 4), nn.Linear(4, DIM), make("batch", DIM)

        def forward(self, x: Tensor) -> Tensor:
            y = self.second(self.middle(self.first(x)))
            return y * y

    folded, _ = check(Both(), torch.randn(3, 4), actions="folded, folded back")
    assert [type(module).__name__ for module in folded.children()] == ["Identity", "Linear", "Identity"]


# -- sharing and ties -------------------------------------------------------------------------------------------------


def test_a_tied_output_stays_tied_or_gets_its_own_copy():
    folded, report = check(Tied(), tokens(2, 5), actions="multiply-add")
    assert folded.head.weight is folded.embedding.weight
    assert "untie=True" in report.rows[0].why
    folded, _ = check(Tied(), tokens(2, 5), actions="folded", untie=True)
    assert folded.head.weight is not folded.embedding.weight


def test_a_shared_layer_and_a_shared_norm():
    class Twice(nn.Module):
        def __init__(self, readers: int):
            super().__init__()
            self.norm = make("batch", DIM)
            self.readers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(readers)])

        def forward(self, x: Tensor) -> Tensor:
            for reader in self.readers:
                x = x + torch.tanh(reader(self.norm(x)))
            return x

    check(Twice(3), torch.randn(4, DIM), actions="folded")

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.reader = make("batch", DIM), make("batch", DIM), nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            return self.reader(self.a(x)) * self.reader(self.b(torch.tanh(x)))

    folded, _ = check(Shared(), torch.randn(4, DIM), actions="folded, multiply-add")
    assert isinstance(folded.b, Affine), "its output has the coordinates of the other norm's"


@pytest.mark.parametrize(("key", "action"), [("weight", "folded"), ("bias", "add")])
def test_two_layers_that_share_a_weight_or_a_bias(key, action):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.a, self.b = make("batch", DIM), nn.Linear(DIM, 4), nn.Linear(DIM, 4)
            setattr(self.b, key, getattr(self.a, key))

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.a(y) * self.b(y)

    folded, report = check(Pair(), torch.randn(3, DIM), actions=action)
    assert getattr(folded.a, key) is getattr(folded.b, key)
    assert key == "weight" or "bias of another product" in report.rows[0].why


def test_parameters_in_shared_memory_are_left_alone():
    model = Read(nn.Linear(DIM, DIM))
    model.other = nn.Parameter(model.reader.weight.data.view(-1))
    _, report = check(model, torch.randn(3, DIM))
    assert "shares memory" in report.rows[0].why


@pytest.mark.parametrize("left", [True, False])
def test_a_learned_number_is_followed_on_both_sides_of_a_product(left):
    class Scaled(Read):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(torch.tanh(x))
            return self.reader(self.alpha * y if left else y * self.alpha)

    model = Scaled(nn.Linear(DIM, 4))
    model.alpha = nn.Parameter(torch.tensor(0.7))
    check(model, torch.randn(3, 5, DIM), actions="folded")
