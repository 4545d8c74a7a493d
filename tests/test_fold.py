"""Norms fold away and nothing changes.

Tested on models of four libraries, every kind of reader, and difficult cases.
"""

import pytest
import torch
import torch.nn.functional as F
from fold_cases import DIM, Read, Two, check
from small_models import built
from third_party_models import FAMILIES, case_of, randomize
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models import convert
from normkit.norms import NORMS, Norm, make

# -- foreign models ---------------------------------------------------------------------------------------------------

STAY = {"torch_encoder_post": 1, "torch_encoder_pre": 1}  # the model's input or output fixes both of their ends


@pytest.mark.parametrize(("name", "untie"), [*((name, False) for name in FAMILIES), ("bert", True), ("t5", True)])
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


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "gemma2", "hf_vit", "timm_convnext", "torchvision_swin"])
def test_gains_and_biases_of_online_norms_fold_too(name):
    case = case_of(name)
    folded, report = fold(
        case.model, *case.args, outputs=case.outputs, untie=True, keep_architecture=False, **case.kwargs
    )
    assert report.max_error < 1e-12
    assert report.count("gain folded") + report.count("kept") == len(report)
    assert report.count("gain folded")
    for row in report:
        site = folded.get_submodule(row.name)
        if row.action == "gain folded":
            assert not list(site.parameters())
            assert "LayerNorm" in str(site) or "RMSNorm" in str(site)
        else:
            assert row.why


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


def turned(layer: nn.Module, spec: str = "batch") -> Read:
    return Read(layer, lambda m, y: m.reader(y.transpose(1, 2)), spec)


def scaled() -> Read:
    model = Read(nn.Linear(DIM, 4), lambda m, y: m.reader(m.alpha * y * m.alpha))
    model.alpha = nn.Parameter(torch.tensor(0.7))
    return model


READERS = {  # model, shape of its input, what becomes of the norm
    "rows in another order": (Read(nn.Linear(DIM, 4), lambda m, y: m.reader(y.transpose(0, 1))), (3, 5, DIM), "folded"),
    "a single vector": (Read(nn.Linear(DIM, 4), lambda m, y: m.reader(y[0, 0])), (3, 5, DIM), "folded"),
    "patches": (Read(nn.Conv2d(DIM, 8, 2, stride=2, groups=2, bias=False), lambda m, y: m.reader(y.movedim(-1, 1))),
                (3, 4, 4, DIM), "folded"),
    "a convolution of one position": (turned(nn.Conv1d(DIM, 4, 1)), (3, 7, DIM), "folded"),
    "zero padding": (turned(nn.Conv1d(DIM, 4, 3, padding=1)), (3, 7, DIM), "add"),
    "zero padding and no shift": (turned(nn.Conv1d(DIM, 4, 3, padding=1), "un(bias=False)"), (3, 7, DIM), "folded"),
    "zero padding, a norm of tokens": (turned(nn.Conv1d(DIM, 4, 3, padding=1), "layer"), (3, 7, DIM), "kept"),
    "padding that repeats": (turned(nn.Conv1d(DIM, 4, 3, padding=1, padding_mode="reflect")), (3, 7, DIM), "folded"),
    "a function": (Read(nn.Linear(DIM, 4), lambda m, y: F.linear(y, m.reader.weight, m.reader.bias)),
                   (3, DIM), "folded"),
    "a function without bias": (Read(nn.Linear(DIM, 4, bias=False), lambda m, y: F.linear(y, m.reader.weight)),
                                (3, DIM), "add"),
    "a bias that is ignored": (Read(nn.Linear(DIM, 4), lambda m, y: F.linear(y, m.reader.weight) * 2), (3, DIM), "add"),
    "a learned number": (scaled(), (3, 5, DIM), "folded"),
    "a sum of shifts over a length": (Read(nn.Linear(DIM, 4), lambda m, y: m.reader(y.sum(1))), (2, 5, DIM), "add"),
}  # fmt: skip


@pytest.mark.parametrize("name", READERS)
def test_a_reader_of_each_kind(name):
    model, shape, action = READERS[name]
    check(model, torch.randn(shape), actions=action)


def test_a_size_that_never_changes_needs_no_care_for_padding():
    case = case_of("hf_swin")
    model = randomize(convert(case.model, "batch")).eval()
    _, report = fold(model, outputs=case.outputs, other_shapes=False, **case.kwargs)
    assert report.foldable == "7 of 7"
    assert not any("pixels" in tried for tried in report.tried)


def test_one_norm_may_feed_queries_keys_values_and_cross_attention():
    def forward(m, x, memory):
        y, memory = m.norm(x), m.memory_norm(torch.tanh(memory))
        return m.self_attn(y, y, y, need_weights=False)[0] + m.cross_attn(y, memory, memory)[0]

    example = torch.randn(2, 5, 8), torch.randn(2, 7, DIM)
    for options in ({}, {"bias": False}):
        first, other = (
            nn.MultiheadAttention(8, 2, kdim=width, vdim=width, batch_first=True, **options) for width in (8, DIM)
        )
        model = built(forward, norm=make("batch", 8), memory_norm=make("un", DIM), self_attn=first, cross_attn=other)
        folded, _ = check(model, *example, actions="folded, folded")
        assert folded.self_attn.in_proj_bias.shape == (24,)


def test_gate_and_up_and_half_of_the_channels_each():
    def forward(m, x):
        y = m.norm(x)
        left, right = y.split([2, 4], -1)
        return F.silu(m.gate(y)) * m.up(y) + m.left(left) + m.right(right.flip(-1))

    layers = {"gate": nn.Linear(DIM, 8), "up": nn.Linear(DIM, 8, bias=False)}
    model = built(forward, norm=make("batch", DIM), left=nn.Linear(2, 8), right=nn.Linear(4, 8), **layers)
    check(model, torch.randn(3, 5, DIM), actions="folded")


def test_two_norms_side_by_side_and_all_tokens_at_once():
    def forward(m, x):
        a = m.a(x[..., :4])
        y = torch.cat([a, torch.tanh(x[..., 6:]), m.b(x[..., 4:6])], -1)
        return m.reader(y).mean(1) @ torch.ones(5, 2) + m.head(a.flatten(1))

    layers = {"reader": nn.Linear(4 + 2 + 3, 5), "head": nn.Linear(4 * 7, 2)}
    model = built(forward, a=make("batch", 4), b=make("layer", 2), **layers)
    folded, _ = check(model, torch.randn(3, 7, 9), actions="folded, gain folded")
    assert isinstance(folded.a, nn.Identity)


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda m, y: m.reader(y) + m.reader.weight.sum(), "aten.sum"),
        (lambda m, y: m.reader(y) + F.linear(torch.ones_like(y), m.reader.weight), "reader.weight"),
        (lambda m, y: F.linear(y, m.reader.weight.clone(), m.reader.bias), "aten.addmm"),
        (lambda m, y: F.linear(y, torch.cat([m.reader.weight, m.reader.weight])), "aten.mm"),
        (lambda m, y: m.reader(y) + F.pad(m.reader.bias, (0, 0)).tanh(), "reader.bias"),
        (lambda m, y: m.reader(y) * y.mean(), "aten.mean"),
        (lambda m, y: m.reader(y) + (1.0 if y.sum() > 0 else -1.0), "aten.sum"),
        (lambda m, y: m.reader(y + 1), "aten.add"),
        (lambda m, y: m.reader(y.relu_()), "aten.relu_"),
        (lambda m, y: (m.reader(y), y), "output"),
        (lambda m, y: m.reader(torch.cat([y, torch.ones_like(y)])), ""),
        (lambda m, y: m.reader(y) + m.reader(y.flip(-1)), "reader.weight"),
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
    def forward(m, x):
        m.last = m.norm(x)
        return m.reader(m.last)

    model = built(forward, norm=make("batch", DIM), reader=nn.Linear(DIM, 4), last=None)
    check(model, torch.randn(3, DIM), actions="multiply-add")


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


def test_an_online_norm_or_another_reader_of_its_input_keeps_a_norm_where_it_is():
    check(Residual(nn.Linear(4, DIM), spec="layer"), torch.randn(3, 4), actions="kept")
    model = Residual(nn.Linear(4, DIM), lambda m, x: (h := m.before(x)) + 0 * h.tanh())
    check(model, torch.randn(3, 4), actions="multiply-add")
    _, report = check(Residual(nn.Identity()), torch.randn(3, 4, DIM), actions="multiply-add")
    assert "input" in report.rows[0].why


# -- sharing and ties -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("key", "action"), [("weight", "folded"), ("bias", "add")])
def test_two_layers_that_share_a_weight_or_a_bias(key, action):
    model = Two(lambda y, a, b: a(y) * b(y))
    setattr(model.b, key, getattr(model.a, key))
    folded, report = check(model, torch.randn(3, DIM), actions=action)
    assert getattr(folded.a, key) is getattr(folded.b, key)
    assert key == "weight" or "bias" in report.rows[0].why


def test_parameters_in_shared_memory_are_left_alone():
    model = Read(nn.Linear(DIM, DIM))
    model.other = nn.Parameter(model.reader.weight.data.view(-1))
    _, report = check(model, torch.randn(3, DIM))
    assert report.rows[0].action != "folded"
    assert "memory" in report.rows[0].why
