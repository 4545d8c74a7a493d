"""The result of folding: an ordinary model, and a report, which `audit` gives alone."""

import copy
import pickle
import warnings
from collections import UserDict

import pytest
import torch
from fold_cases import DIM, Read, Tied, check
from small_models import built
from third_party_models import case_of, randomize, tokens
from torch import Tensor, nn

import normkit as nk
from normkit.fold import Audit, Outcome, audit, fold, to_rms
from normkit.models import convert, export
from normkit.norms import make


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
    assert "peft" in report.rows[0].why
    for last in (folded[2], folded[2].merged()):
        torch.testing.assert_close(last(folded[1](folded[0](x))), model(x))


def test_the_result_is_ordinary_and_loads_without_normkit():
    model = randomize(nn.Sequential(nn.Linear(4, DIM), nn.Tanh(), make("un", DIM), nn.Linear(DIM, 3))).eval()
    folded, _ = fold(model, x := torch.randn(5, 4))
    plain = nn.Sequential(nn.Linear(4, DIM), nn.Tanh(), nn.Identity(), nn.Linear(DIM, 3))
    plain.load_state_dict(folded.state_dict())
    torch.testing.assert_close(plain(x), folded(x))
    assert b"normkit" not in pickle.dumps(folded)


def test_folding_twice_changes_nothing_more():
    model = randomize(nn.Sequential(make("layer", DIM), nn.Linear(DIM, 4))).eval()
    folded, _ = fold(model, torch.randn(3, DIM))
    again, report = fold(folded, torch.randn(3, DIM))
    assert report.count("kept") == 1
    assert torch.equal(again[1].weight, folded[1].weight)


def test_the_report_notes_a_comparison_that_shows_nothing():
    model = nn.Sequential(nn.Linear(DIM, DIM), randomize(make("un", DIM)), nn.Linear(DIM, 2)).eval()
    x = torch.randn(3, DIM)
    usual = fold(model, x)[1].summary
    nn.init.zeros_(model[2].weight)  # as heads and gates often start
    assert fold(model, x)[1].summary.count("\n") == usual.count("\n") + 1


# -- bad input --------------------------------------------------------------------------------------------------------


def test_what_is_left_of_a_frozen_norm_stays_frozen():
    for trainable in (True, False):
        model = nn.Sequential(make("un", 4), nn.Tanh()).requires_grad_(trainable)
        folded, report = fold(model.eval(), torch.randn(2, 4))
        assert report.foldable == "0 of 1"
        assert {p.requires_grad for p in folded.parameters()} == {trainable}


def test_outputs_that_rounding_changes_are_no_overflow():
    def forward(m, x):
        y = m.reader(m.norm(x))
        return y.argmax(-1), torch.complex(y.float(), y.float())

    model = randomize(built(forward, norm=make("un", DIM), reader=nn.Linear(DIM, 4))).eval().bfloat16()
    _, report = fold(model, torch.randn(2000, DIM).bfloat16())
    assert (report.max_error < 1e-12, report.native_error) == (True, float("inf"))
    _, report = fold(model.float(), torch.randn(30, DIM), outputs=lambda out: out[1])
    assert 0 < report.native_error < 1e-5


def test_parameters_of_untied_layers_are_counted():
    model = convert(Tied(), "rms").eval()
    for untie in (False, True):
        folded, report = fold(model, tokens(2, 5), untie=untie)
        assert report.saved - report.untied == count(model) - count(folded)
        assert report.untied == (model.embedding.weight.numel() if untie else 0)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_a_norm_that_never_runs_is_kept_and_reported():
    model = Read(nn.Linear(DIM, 4))
    model.idle = make("un", 3)
    _, report = check(model, torch.randn(3, DIM), actions="folded, kept")
    assert report.rows[1].why == "it never ran"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", ["un", "un(affine=False)", "dyt"])
def test_what_stays_of_a_norm_keeps_the_type_of_its_input(spec, dtype):
    norms = [make(spec, 8) for _ in range(2)]
    model = nn.Sequential(nn.ReLU(), norms[0], nn.ReLU(), norms[1], nn.ReLU(), nn.Linear(8, 4)).to(dtype).eval()
    norms[1].float()  # its parameters
    x = torch.randn(3, 8).to(dtype)
    folded, report = fold(model, x)
    assert folded(x).dtype is dtype
    assert report.native_error < 0.1


def test_a_forward_that_changes_its_input():
    def forward(m, x):
        x += 1
        return m.layers(x)

    x = torch.randn(2, 5, 8, dtype=torch.float64)
    before = x.clone()
    model = built(forward, layers=nn.Sequential(nn.Linear(8, 8), make("un", 8), nn.Linear(8, 8)))
    _, report = fold(model.double().eval(), x)
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
    plain = built(lambda m, x, mask=None: m.reader(m.norm(x)), norm=make("layer", DIM), reader=nn.Linear(DIM, 4))
    model = convert(plain, "instance", mask_from="mask")
    x, mask = torch.randn(2, 7, DIM), torch.arange(14).view(2, 7) % 7 < torch.tensor([[7], [4]])
    folded, _ = check(model, x, mask, actions="gain folded")
    torch.testing.assert_close(folded(x, ~mask), model(x, ~mask))


@pytest.mark.parametrize("wrap", [lambda y: {"logits": y, "n": 3}, lambda y: [y, (y * 2, None)]])
def test_outputs_of_any_structure(wrap):
    check(Read(nn.Linear(DIM, 4), lambda m, y: wrap(m.reader(y))), torch.randn(3, DIM), actions="folded")


# -- models that keep state, and gradients that are off ----------------------------------------------------------------


@pytest.mark.parametrize("assigns", [False, True])
def test_a_buffer_that_the_forward_changes_holds_the_original_numbers(assigns):
    """A model that keeps a moving average of a norm's output, and reads it in no output."""

    def forward(m, x):
        y = m.norm(m.first(x))
        mean = y.mean(0, keepdim=True) * 0.1
        if assigns:
            m.mean = m.mean * 0.9 + mean
        else:
            m.mean.mul_(0.9).add_(mean)
        return m.last(y)

    layers = {"first": nn.Linear(DIM, DIM), "norm": make("batch", DIM), "last": nn.Linear(DIM, 3)}
    model = built(forward, **layers, mean=nn.Buffer(torch.zeros(1, DIM)))
    folded, _ = check(model, torch.randn(4, DIM))  # the buffer of the original stays as well
    assert not bool(folded.mean.any())
    for _ in range(3):
        x = torch.randn(4, DIM)
        torch.testing.assert_close(folded(x), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(folded.mean, model.mean, rtol=1e-4, atol=1e-5)


def test_a_model_that_is_folded_in_inference_mode_can_be_trained():
    model = randomize(Read(nn.Linear(DIM, 4))).eval()
    with torch.inference_mode():
        folded, report = fold(model, torch.randn(3, DIM))
    assert report.foldable == "1 of 1"
    folded(torch.randn(3, DIM)).sum().backward()
    assert folded.reader.weight.grad is not None


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_batch_of_keywords_is_an_example(kind, tmp_path):
    model, batch = randomize(Read(nn.Linear(DIM, 4))).eval(), kind(x=torch.randn(3, DIM))
    assert fold(model, batch)[1].foldable == audit(model, batch).foldable == "1 of 1"
    assert export(model, tmp_path / "model.pt2", batch).max_error < 1e-6


def test_a_mapping_that_the_model_takes_stays_one():
    class Takes(Read):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["x"])

    model, batch = Takes(nn.Linear(DIM, 4)), {"x": torch.randn(3, DIM)}
    folded, _ = check(model, batch, actions="folded")
    torch.testing.assert_close(folded(copy.copy(batch)), model(batch), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="on the example"):
        fold(model, {"y": batch["x"]})


# -- running statistics that no training has set -----------------------------------------------------------------------


X = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def made(spec, steps=0):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nk.make(spec, 4), nn.Linear(4, 4))
    for _ in range(steps):
        model(X)
    return model.eval()


def calibrated(spec):
    return nk.calibrate(made(spec, 2), [(X,)])


def loaded(spec):
    model = made(spec)
    model.load_state_dict(calibrated(spec).state_dict())
    return model


@pytest.mark.parametrize(
    "model",
    [made("layer"), made("rms"), made("pnv", 1), made("un(warmup=5)", 6), calibrated("un"), loaded("un"),
     nk.convert(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval(), "layer")],
)  # fmt: skip
def test_statistics_that_were_meant_are_silent(model):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* running statistics of norms")
        nk.fold(model, X)


@pytest.mark.parametrize(
    ("model", "state"),
    [(made("un"), "never"), (made("pnv"), "never"), (made("un(warmup=5)", 3), "warm-up"),
     (made("power", 3), "warm-up"), (made("un(warmup=auto)", 3), "warm-up")],
)  # fmt: skip
def test_statistics_that_are_not_trained_are_named(model, state, tmp_path):
    for verb in (lambda: nk.fold(model, X), lambda: nk.export(model, tmp_path / "model.pt2", X)):
        with pytest.warns(UserWarning, match=state) as found:
            verb()
        assert len([warning for warning in found if "(1)" in str(warning.message)]) == 1


def test_reports_name_norms_that_cannot_be_read():
    model = nn.Sequential(make("un", DIM), nn.Linear(DIM, 4), nn.InstanceNorm1d(3)).eval()
    report = fold(model, torch.randn(2, 3, DIM))[1]
    assert "InstanceNorm1d" in str(report)
    assert report.unreadable == audit(model, torch.randn(2, 3, DIM)).unreadable


def outcomes(*names, into="{}.up", norm="un", action="folded"):
    return [Outcome(name, norm, action, (into.format(name.rpartition(".")[0]),)) for name in names]


def test_norms_that_are_alike_in_three_blocks_share_a_line():
    rows = [
        *outcomes("first", into="h.0.up"), *outcomes(*(f"h.{n}.one" for n in (0, 1, 2, 5))),
        *outcomes("g.0.norm", "g.1.norm"), *outcomes(*(f"h.{n}.two" for n in range(3)), into="{}.0.up"),
        *(Outcome(f"k.{n}.norm", "un", "folded", (f"k.{9 - n * n}.up",)) for n in range(3)),
        *outcomes(*(f"s.{n}.b.{k}.norm" for n in range(2) for k in range(3 + n))),
    ]  # fmt: skip
    table = [" ".join(line.split()) for line in Audit(tuple(rows), ()).table.splitlines()[1:]]
    assert table == [
        "first un folded h.0.up", "h.{0-2,5}.one un folded h.*.up", "g.0.norm un folded g.0.up",
        "g.1.norm un folded g.1.up", "h.{0-2}.two un folded h.*.0.up", "k.0.norm un folded k.9.up",
        "k.1.norm un folded k.8.up", "k.2.norm un folded k.5.up", "s.0.b.{0-2}.norm un folded s.0.b.*.up",
        "s.1.b.{0-3}.norm un folded s.1.b.*.up",
    ]  # fmt: skip


def test_a_line_of_a_report_has_at_most_120_characters():
    name, reader = "encoder.layer.0.attention.output.LayerNorm", "encoder.layer.0.attention.self.query"
    row = Outcome(name, "un(eps=9.999999747378752e-06)", "folded", tuple(f"{reader}{i}" for i in range(9)), "so " * 60)
    text = str(Audit((row,), ("the example",)))
    assert max(map(len, text.splitlines())) <= 120
    assert text.count(reader) == 4
    assert "un(eps=1e-05)" in text


# -- the report without a fold ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "torchvision_swin"])
def test_audit_predicts_fold_and_changes_nothing(name):
    case = case_of(name)
    model = randomize(convert(case.model, "un")).eval()
    before = str(model), {key: t.clone() for key, t in model.state_dict().items()}
    found = audit(model, *case.args, outputs=case.outputs, **case.kwargs)
    assert str(model) == before[0]
    for key, t in model.state_dict().items():
        assert torch.equal(t, before[1][key])
    _, report = fold(model, *case.args, outputs=case.outputs, **case.kwargs)
    assert found.rows == report.rows
    assert len(found) == len(list(found))


class Flagged(nn.Sequential):
    def forward(self, x, attention_mask=None, only_norm=False, context=None, scale=1.0):
        return self[0](x) if only_norm else super().forward(x)


def test_arguments_that_the_example_does_not_have_are_named():
    model = convert(Flagged(nn.LayerNorm(4), nn.Linear(4, 4)), "un").eval()
    found = audit(model, torch.randn(3, 4))
    assert (found.absent, found.deciding) == (("attention_mask", "only_norm=False", "context", "scale=1.0"), ())
    assert audit(model, torch.randn(3, 4), None, False, scale=2.0).absent == ("attention_mask", "context")


class Deciding(nn.Sequential):
    def forward(self, x):
        x = self[0](x)
        return self[1](self[2](x) if x.mean() > -100 else x)


def test_modules_that_branch_on_values_are_named():
    model = nn.Sequential(nn.Linear(4, 4), Deciding(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)))
    assert audit(convert(model, "un").eval(), torch.randn(3, 4)).deciding == ("1",)
    assert audit(convert(model[0:1].append(nn.LayerNorm(4)), "un").eval(), torch.randn(3, 4)).deciding == ()
