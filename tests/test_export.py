"""Exported files run, compute the same, and folded graphs hold no norm."""

import sys

import onnx
import pytest
import torch
from third_party_models import CASES, case_of, randomize
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models import convert, export
from normkit.models.export import operations_of, program_of
from normkit.norms import make

MODELS = ["bert", "t5", "torch_encoder_pre", "torchvision_swin"]
OTHERWISE = {  # divisions and means that are no norm's
    "t5": {"Div", "aten.div"},  # buckets of relative positions
    "torchvision_swin": {"ReduceMean"},  # pooling of all positions before the head
}


def folded(name: str):
    case = case_of(name)
    model = randomize(convert(case.model, "un")).eval()
    return case, model, fold(model, *case.args, outputs=case.outputs, untie=True, **case.kwargs)[0]


@pytest.mark.parametrize(("name", "ending"), [*((name, "onnx") for name in MODELS), ("bert", "pt2"), ("t5", "pt2")])
def test_a_folded_graph_holds_no_normalization_no_division_no_root(name, ending, tmp_path):
    case, _, plain = folded(name)
    path = tmp_path / f"model.{ending}"
    exported = export(plain, path, *case.args, outputs=case.outputs, **case.kwargs)
    assert path.exists()
    assert exported.max_error < 1e-5
    assert set(exported.normalizing) <= OTHERWISE.get(name, set()), str(exported)


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_exported_graph_holds_online_norms_and_multiply_adds_of_offline_ones(ending, tmp_path):
    case, model, plain = folded("hf_vit")
    counts = {}
    for key, each in (("layer", case.model), ("un", model), ("folded", plain)):
        counts[key] = export(each, tmp_path / f"{key}.{ending}", outputs=case.outputs, **case.kwargs)
    assert sum(counts["layer"].normalizing.values()) == 5
    if ending == "onnx":
        assert counts["un"].normalizing == counts["folded"].normalizing == {}
        extra = {op: n - counts["folded"].operations.get(op, 0) for op, n in counts["un"].operations.items()}
        assert {op: n for op, n in extra.items() if n} == {"Mul": 5, "Add": 5}
    assert sum(counts["folded"].operations.values()) < sum(counts["un"].operations.values())


def test_an_exported_file_takes_other_batch_sizes_and_lengths(tmp_path):
    import onnxruntime

    case, _, plain = folded("bert")
    done = export(plain, tmp_path / "model.onnx", outputs=case.outputs, **case.kwargs)
    assert done.dynamic == {"input_ids": (0, 1), "attention_mask": (0, 1)}
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [slot.name for slot in session.get_inputs()] == ["input_ids", "attention_mask"]
    more = {key: torch.cat([t, t, t[:1]]) for key, t in case.kwargs.items()}
    more = {key: torch.cat([t, t[:, :2]], 1) for key, t in more.items()}
    (out,) = session.run(None, {key: t.numpy() for key, t in more.items()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(out), plain(**more).logits, rtol=1e-4, atol=1e-5)
    onnx.checker.check_model(str(tmp_path / "model.onnx"))


def test_a_single_row_and_a_fixed_batch(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()
    assert export(model, tmp_path / "a.onnx", torch.randn(1, 4)).max_error < 1e-6
    assert export(model, tmp_path / "b.pt2", torch.randn(3, 4), dynamic=False).operations == {
        "aten.linear": 1,
        "aten.relu": 1,
    }


def test_operations_are_counted():
    assert operations_of(program_of(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)).eval(), torch.zeros(1, 2))) == {
        "aten.layer_norm": 1,
        "aten.linear": 1,
    }


class Several(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = make("un", 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, scale: float, more=None):
        y = self.head(self.norm(x))
        return {"logits": y * scale, "rest": (y, None)} if more is None else {"logits": y + more["bias"]}


def test_mappings_numbers_and_nested_inputs(tmp_path):
    model = randomize(Several()).eval()
    x = torch.randn(3, 4)
    assert export(model, tmp_path / "a.onnx", x, 2.0).max_error < 1e-6
    assert export(model, tmp_path / "b.onnx", x, 2.0, more={"bias": torch.randn(3, 2)}).max_error < 1e-6
    one = export(model, tmp_path / "c.pt2", x, 2.0, outputs=lambda out: out["logits"])
    assert one.max_error < 1e-6


def test_a_file_that_is_wrong_replaces_none(tmp_path, monkeypatch):
    path, x = tmp_path / "m.pt2", torch.randn(2, 4)
    export(nn.Linear(4, 2).eval(), path, x)
    before = path.read_bytes()
    monkeypatch.setattr(sys.modules["normkit.models.export"], "error", lambda *given: 1.0)
    with pytest.raises(ValueError, match="computes something else"):
        export(nn.Linear(4, 2).eval(), path, x)
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt2"]
    assert path.read_bytes() == before


def test_inputs_without_names_and_with_gradients(tmp_path):
    class Sum(nn.Module):
        def forward(self, *xs):
            return xs[0] + 2 * xs[1]

    given = (torch.randn(2, 4), torch.randn(2, 4, requires_grad=True))
    assert export(Sum().eval(), tmp_path / "m.onnx", *given).max_error < 1e-6


def test_bad_input_raises(tmp_path, monkeypatch):
    model = nn.Sequential(make("un", 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match="training mode"):
        export(model, tmp_path / "m.onnx", torch.randn(2, 4))
    model.eval()
    with pytest.raises(ValueError, match=r"m\.pb"):
        export(model, tmp_path / "m.pb", torch.randn(2, 4))
    with pytest.raises(ValueError, match="could not run the model"):
        export(model, tmp_path / "m.onnx", torch.randn(2, 3))
    with pytest.raises(ValueError, match="no tensor"):
        export(model, tmp_path / "m.onnx", torch.randn(2, 4), outputs=lambda out: None)
    with pytest.raises(ValueError, match="could not apply outputs= to what the model returned"):
        export(model, tmp_path / "m.pt2", torch.randn(2, 4), outputs=lambda out: out.logits)
    for wrong in (-1.0, "low"):
        with pytest.raises(ValueError, match="tolerance must be a number of at least 0; got "):
            export(model, tmp_path / "m.pt2", torch.randn(2, 4), tolerance=wrong)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"pip install 'normkit\[export\]'"):
        export(model, tmp_path / "m.onnx", torch.randn(2, 4))
    assert "torch_encoder_pre" in CASES


class Masked(nn.Module):
    """A model that adds to its input in place, and also returns the size of the batch."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.offset = nn.LayerNorm(8), nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x, attention_mask=None):
        x += self.offset
        return self.linear(self.norm(x)), x.shape[0]


def test_masks_leave_the_batch_open_and_no_operation(tmp_path):
    model = convert(Masked(), "un", mask_from="attention_mask").eval()
    for batch in (4, 5):
        x, mask = torch.randn(batch, 5, 8), torch.ones(batch, 5, dtype=torch.bool)
        done = export(model, tmp_path / "model.pt2", x.clone(), attention_mask=mask)
        assert not done.operations.keys() & {"aten.__xor__", "aten.bitwise_not", "aten.to", "aten.t"}
        assert not done.operations.keys() & {"aten.any", "aten.where"}
        program = torch.export.load(tmp_path / "model.pt2").module()
        for other in (2, 5, 7):
            x, mask = torch.randn(other, 5, 8), torch.ones(other, 5, dtype=torch.bool)
            torch.testing.assert_close(program(x.clone(), mask)[0], model(x.clone(), mask)[0])


class FixedLength(nn.Module):
    """A model whose weights mix tokens, as in MLP-Mixer: it takes one length."""

    def __init__(self):
        super().__init__()
        self.tokens, self.channels = nn.Linear(6, 6), nn.Linear(8, 8)

    def forward(self, x):
        return self.channels(self.tokens(x.mT).mT)


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_an_axis_that_the_model_fixes_stays_fixed(ending, tmp_path):
    done = export(FixedLength().eval(), tmp_path / f"model.{ending}", torch.randn(3, 6, 8))
    assert done.dynamic == {"x": (0,)}
    assert done.max_error < 1e-6
    assert export(nn.Linear(4, 2).eval(), tmp_path / f"one.{ending}", torch.randn(3, 4), dynamic=False).dynamic == {}
