"""The result of folding: an ordinary model, a report.

Models that cannot be folded raise errors.
"""

import copy
import subprocess
import sys

import pytest
import torch
from fold_cases import DIM, Read, Tied, check
from safetensors.torch import load_file, save_file
from third_party_models import CASES, randomize, tokens
from torch import Tensor, nn

from normkit.fold import audit, fold, to_rms
from normkit.models import calibrate, convert
from normkit.models.affine import Affine
from normkit.norms import make

# -- the result -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["dyt", "derf"])
def test_what_stays_of_a_norm_keeps_its_type(spec):
    model = randomize(nn.Sequential(make(spec, DIM), nn.Linear(DIM, 4))).eval().bfloat16()
    folded, report = fold(model, torch.randn(64, DIM).bfloat16())
    before, after = model.state_dict(), folded.state_dict()
    assert report.rows[0].action == "gain folded"
    assert {key: after[key].dtype for key in after} == {key: before[key].dtype for key in after}


def test_half_precision_weights_fold_in_float64_first():
    model = randomize(nn.Sequential(make("batch", DIM), nn.Linear(DIM, 4))).eval().bfloat16()
    x = torch.randn(64, DIM).bfloat16()
    folded, report = fold(model, x)
    assert folded[1].weight.dtype == torch.bfloat16
    scale, shift = (t.double() for t in model[0].split()[1:])
    weight = model[1].weight.double()
    torch.testing.assert_close(folded[1].weight, (weight * scale).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(folded[1].bias, (model[1].bias.double() + weight @ shift).bfloat16(), rtol=0, atol=0)
    assert report.max_error < 1e-12
    assert report.native_error < 0.05


class Adapted(nn.Module):
    """A Linear layer with an adapter, as peft's LoRA names and merges it."""

    def __init__(self):
        super().__init__()
        self.base_layer = nn.Linear(DIM, 4)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(DIM, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 4, bias=False)})

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + 2 * self.lora_B["default"](self.lora_A["default"](x))

    def merged(self) -> nn.Linear:
        merged = copy.deepcopy(self.base_layer)
        merged.weight.data += 2 * self.lora_B["default"].weight @ self.lora_A["default"].weight
        return merged


def test_a_folded_adapter_can_still_be_merged():
    model = randomize(nn.Sequential(nn.Tanh(), make("batch", DIM), Adapted())).eval()
    x = torch.randn(5, DIM)
    folded, report = fold(model, x)
    assert report.rows[0].action == "add", "the gain is folded"
    assert "peft would drop one" in report.rows[0].why
    for last in (folded[2], folded[2].merged()):
        torch.testing.assert_close(last(folded[1](folded[0](x))), model(x))


def test_the_result_is_ordinary_and_loads_without_normkit(tmp_path):
    model = randomize(nn.Sequential(nn.Linear(4, DIM), nn.Tanh(), make("un", DIM), nn.Linear(DIM, 3))).eval()
    x = torch.randn(5, 4)
    folded, _ = fold(model, x)
    save_file(folded.state_dict(), tmp_path / "model.safetensors")
    torch.save(folded, tmp_path / "model.pt")
    torch.save((x, folded(x).detach()), tmp_path / "example.pt")
    code = f"""
import sys, torch
from torch import nn
from safetensors.torch import load_file
model = nn.Sequential(nn.Linear(4, {DIM}), nn.Tanh(), nn.Identity(), nn.Linear({DIM}, 3)).eval()
model.load_state_dict(load_file(r"{tmp_path}/model.safetensors"))
x, y = torch.load(r"{tmp_path}/example.pt")
torch.testing.assert_close(model(x), y)
whole = torch.load(r"{tmp_path}/model.pt", weights_only=False)
torch.testing.assert_close(whole(x), y)
assert "normkit" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_folding_twice_changes_nothing_more():
    model = randomize(nn.Sequential(make("layer", DIM), nn.Linear(DIM, 4))).eval()
    folded, _ = fold(model, torch.randn(3, DIM))
    again, report = fold(folded, torch.randn(3, DIM))
    assert report.count("kept") == 1
    assert "no gain or bias to fold" in report.rows[0].why
    assert torch.equal(again[1].weight, folded[1].weight)


def test_a_batch_norm_of_pytorch_folds_as_it_is():
    model = nn.Sequential(nn.Linear(4, DIM), nn.BatchNorm1d(DIM), nn.ReLU(), nn.BatchNorm1d(DIM), nn.Linear(DIM, 2))
    folded, _ = check(model, torch.randn(8, 4), actions="folded back, folded")
    assert [type(m).__name__ for m in folded] == ["Linear", "Identity", "ReLU", "Identity", "Linear"]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(DIM, DIM, 3, padding=1, bias=False) for _ in range(2))
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(DIM), nn.BatchNorm2d(DIM), nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x
        return self.relu(y)


@pytest.mark.parametrize("norm", ["as it is", "un"])
def test_a_convolutional_network_folds_whole(norm):
    model = nn.Sequential(nn.Conv2d(3, DIM, 3, bias=False), nn.BatchNorm2d(DIM), nn.ReLU(inplace=True), Residual(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(DIM, 2))  # fmt: skip
    model = randomize(model) if norm == "as it is" else convert(randomize(model), norm)
    check(model, torch.randn(2, 3, 9, 9), actions="folded back, folded back, folded back")


def test_the_report_prints_an_aligned_table():
    _, report = check(Tied(), tokens(2, 5))
    lines = report.table.splitlines()
    assert lines[0].split() == ["norm", "is", "becomes", "into,", "or", "why", "not"]
    assert lines[1].index("multiply-add") == lines[0].index("becomes")
    assert "compared on: " + "; ".join(report.tried) in report.summary.splitlines()


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_reports_count_gains_and_what_untying_adds(name):
    case = CASES[name]()
    _, report = fold(case.model, *case.args, outputs=case.outputs, untie=True, **case.kwargs)
    gains, added = report.count("gain folded"), case.model.get_input_embeddings().weight.numel()
    head = case.model.get_output_embeddings()
    assert gains > 1
    assert report.untied == added == head.weight.numel()
    assert f"{gains} others" in report.summary
    assert f"{added:,} added by untying" in report.summary


def test_the_report_notes_a_comparison_that_shows_nothing():
    model = nn.Sequential(nn.Linear(DIM, DIM), randomize(make("un", DIM)), nn.Linear(DIM, 2)).eval()
    x = torch.randn(3, DIM)
    assert "this shows nothing" not in str(fold(model, x)[1])
    nn.init.zeros_(model[2].weight)  # as heads and gates often start
    assert "this shows nothing" in str(fold(model, x)[1])


def test_folded_encoder_in_pytorchs_fast_path_is_correct():
    case = CASES["torch_encoder_pre"]()
    model = convert(case.model, "batch", mask_from="src_key_padding_mask")
    model = calibrate(model, [((case.args[0]), case.kwargs["src_key_padding_mask"])],
                      forward=lambda m, b: m(b[0], src_key_padding_mask=b[1])).eval()  # fmt: skip
    folded, _ = fold(model, *case.args, **case.kwargs)
    with torch.no_grad():
        torch.testing.assert_close(folded(*case.args, **case.kwargs), model(*case.args, **case.kwargs))
    assert isinstance(folded.norm, Affine)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_what_is_left_of_a_frozen_norm_stays_frozen():
    for trainable in (True, False):
        model = nn.Sequential(make("un", 4), nn.Tanh()).requires_grad_(trainable)
        folded, report = fold(model.eval(), torch.randn(2, 4))
        assert report.foldable == "0 of 1"
        assert {p.requires_grad for p in folded.parameters()} == {trainable}


def test_reports_name_norms_that_cannot_be_read():
    model = nn.Sequential(make("un", DIM), nn.Linear(DIM, 4), nn.InstanceNorm1d(3)).eval()
    report = fold(model, torch.randn(2, 3, DIM))[1]
    assert "left as they are, since they cannot be read: 2 (no reader for the class name InstanceNorm1d)" in str(report)
    assert report.unreadable == audit(model, torch.randn(2, 3, DIM)).unreadable


def test_outputs_of_any_shape_and_none_at_all():
    class Out(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.norm, self.reader, self.wrap = make("batch", DIM), nn.Linear(DIM, 4), wrap

        def forward(self, x: Tensor):
            return self.wrap(self.reader(self.norm(x)))

    for wrap in (lambda y: {"logits": y, "n": 3}, lambda y: (y, (y * 2, None)), lambda y: [y]):
        check(Out(wrap), torch.randn(3, DIM), actions="folded")


def test_outputs_that_rounding_changes_are_no_overflow():
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.reader = make("un", DIM), nn.Linear(DIM, 4)

        def forward(self, x: Tensor):
            y = self.reader(self.norm(x))
            return y.argmax(-1), torch.complex(y.float(), y.float())

    model = randomize(Classes()).eval().bfloat16()
    _, report = fold(model, torch.randn(2000, DIM).bfloat16())
    assert (report.max_error < 1e-12, report.native_error) == (True, float("inf"))
    _, report = fold(model.float(), torch.randn(30, DIM), outputs=lambda out: out[1])
    assert 0 < report.native_error < 1e-5


def test_parameters_of_untied_and_of_parametrized_layers_are_counted():
    model = convert(Tied(), "rms").eval()
    for untie in (False, True):
        folded, report = fold(model, tokens(2, 5), untie=untie)
        assert report.saved - report.untied == count(model) - count(folded)
        assert report.untied == (model.embedding.weight.numel() if untie else 0)
    model = nn.Sequential(nn.Linear(4, DIM), make("un", DIM), nn.Linear(DIM, 2))
    for layer in (model[0], model[2]):
        nn.utils.parametrizations.weight_norm(layer)
    model.eval()
    folded, report = fold(model, torch.randn(3, 4))
    assert report.saved == count(model) - count(folded) == 2 * DIM + DIM + 2


@pytest.mark.parametrize("second", ["un", "layer"])
def test_a_gain_that_two_norms_share_is_counted_once(second):
    model = nn.Sequential(make("un", DIM), nn.Linear(DIM, DIM), make(second, DIM), nn.Linear(DIM, 2)).eval()
    model[2].weight = model[0].weight
    folded, report = fold(model, torch.randn(3, DIM))
    assert report.saved == count(model) - count(folded), str(report)
    model = nn.Sequential(*model[:3], nn.Flatten()).eval()  # the second stays
    folded, report = fold(model, torch.randn(3, DIM))
    assert report.saved == count(model) - count(folded), str(report)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_a_norm_that_never_runs_is_kept_and_reported():
    model = Read(nn.Linear(DIM, 4))
    model.idle = make("un", 3)
    _, report = check(model, torch.randn(3, DIM), actions="folded, kept")
    assert report.rows[1].why == "it never ran"


def test_a_shift_alone_folds_through_a_layer_scale_into_a_new_bias():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.layer = make("nonorm(affine=True)", 4), nn.Linear(4, 3, bias=False)
            self.gamma = nn.Parameter(torch.rand(4) + 0.5)
            nn.init.normal_(self.norm.bias)

        def forward(self, x):
            return self.layer(self.gamma * self.norm(torch.tanh(x)))

    model = Scaled().eval()
    folded, report = fold(model, torch.randn(3, 4))
    assert report.foldable == "1 of 1"
    assert report.saved == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in folded.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("affine", [False, True])
def test_what_stays_of_a_norm_keeps_the_type_of_its_input(affine, dtype):
    norms = [make(f"un(affine={affine})", 8) for _ in range(2)]
    model = nn.Sequential(nn.ReLU(), norms[0], nn.ReLU(), norms[1], nn.ReLU(), nn.Linear(8, 4)).to(dtype).eval()
    norms[1].float()  # its parameters
    x = torch.randn(3, 8).to(dtype)
    folded, report = fold(model, x)
    assert folded(x).dtype is dtype
    assert report.native_error < 0.1


def test_a_forward_that_changes_its_input():
    class InPlace(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 8), make("un", 8), nn.Linear(8, 8))

        def forward(self, x):
            x += 1
            return self.layers(x)

    x = torch.randn(2, 5, 8, dtype=torch.float64)
    before = x.clone()
    _, report = fold(InPlace().double().eval(), x)
    assert report.foldable == "1 of 1"
    assert report.native_error < 1e-12
    assert torch.equal(x, before)


def test_the_analysis_stays_on_the_cpu_whatever_the_default_device_is():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=False)
    model = randomize(nn.Sequential(nn.Embedding(50, 8), encoder, nn.Linear(8, 3))).eval()
    ids = torch.randint(0, 50, (3, 5))
    offline = randomize(convert(model, "un")).eval()
    torch.set_default_device("meta")  # where nothing could be computed
    try:
        assert audit(offline, ids).foldable == "5 of 5"
        assert fold(offline, ids)[1].max_error < 1e-12
        assert to_rms(model, ids)[1].max_error < 1e-12
    finally:
        torch.set_default_device(None)


def test_what_stays_of_a_norm_over_samples_gets_the_mask():
    class Masked(Read):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x)

    model = convert(Masked(nn.Linear(DIM, 4), spec="layer"), "instance", mask_from="mask")
    x, mask = torch.randn(2, 7, DIM), torch.arange(14).view(2, 7) % 7 < torch.tensor([[7], [4]])
    folded, _ = check(model, x, mask, actions="gain folded")
    torch.testing.assert_close(folded(x, ~mask), model(x, ~mask))
