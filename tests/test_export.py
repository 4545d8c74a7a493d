"""Exported files run, compute the same, and folded graphs hold no norm; exports in 8-bit integers."""

import functools
import sys
from collections import Counter

import onnx
import pytest
import torch
import torch.nn.functional as F
from small_models import built
from third_party_models import case_of, randomize
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models import convert, export
from normkit.norms import make

OTHERWISE = {  # divisions and means that are no norm's
    "t5": {"Div", "aten.div"},  # buckets of relative positions
    "torchvision_swin": {"ReduceMean"},  # pooling of all positions before the head
}


@functools.cache
def folded(name: str):
    case = case_of(name)
    model = randomize(convert(case.model, "un")).eval()
    return case, model, fold(model, *case.args, outputs=case.outputs, untie=True, **case.kwargs)[0]


@pytest.mark.parametrize(("name", "ending"), [("torchvision_swin", "onnx"), ("t5", "pt2")])
def test_a_folded_graph_holds_no_normalization_no_division_no_root(name, ending, tmp_path):
    case, _, plain = folded(name)
    path = tmp_path / f"model.{ending}"
    exported = export(plain, path, *case.args, outputs=case.outputs, **case.kwargs)
    assert path.exists()
    assert exported.max_error < 1e-5
    assert set(exported.normalizing) <= OTHERWISE.get(name, set()), str(exported)


def test_exported_graph_holds_online_norms_and_multiply_adds_of_offline_ones(tmp_path):
    case, model, plain = folded("hf_vit")
    counts = {}
    for key, each in (("layer", case.model), ("un", model), ("folded", plain)):
        counts[key] = export(each, tmp_path / "m.onnx", outputs=case.outputs, **case.kwargs)
    assert sum(counts["layer"].normalizing.values()) == 5
    assert counts["un"].normalizing == counts["folded"].normalizing == {}
    extra = {op: n - counts["folded"].operations.get(op, 0) for op, n in counts["un"].operations.items()}
    assert {op: n for op, n in extra.items() if n} == {"Mul": 5, "Add": 5}
    assert export(nn.LayerNorm(4).eval(), tmp_path / "m.pt2", torch.randn(2, 4)).normalizing


@pytest.mark.parametrize(("name", "count", "int8"), [("bert", 2, "dynamic"), ("timm_vit", 6, None)])
def test_attention_becomes_one_operation_with_and_without_norms(name, count, int8, tmp_path):
    case, _, plain = folded(name)
    given = {"outputs": case.outputs, "fuse_attention": True, **case.kwargs}
    for model, kind in ((case.model, None), (plain, int8)):
        done = export(model, tmp_path / "model.onnx", *case.args, int8=kind, **given)
        assert done.operations["MultiHeadAttention"] == count
        assert "Softmax" not in done.operations
        assert (done.max_error < 1e-5) if kind is None else done.cosine > 0.99


def test_fused_attention_is_causal_and_masked_as_the_model_says(tmp_path):
    class Attend(nn.Module):
        def __init__(self, **options):
            super().__init__()
            self.options = options

        def forward(self, x, mask=None):
            q, k, v = x.unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            if "enable_gqa" in self.options:
                k, v = k[:, :1], v[:, :1]
            return nn.functional.scaled_dot_product_attention(q, k, v, mask, **self.options)

    x, mask = torch.randn(3, 5, 24), torch.rand(5, 5) < 0.7
    mask |= torch.eye(5, dtype=torch.bool)
    rows = torch.arange(5) < torch.tensor([5, 3, 1]).view(3, 1, 1, 1)
    for options, given in [({"is_causal": True}, {}), ({"scale": 0.1}, {"mask": mask}), ({}, {"mask": rows}),
                           ({}, {"mask": torch.randn(3, 2, 5, 5)})]:  # fmt: skip
        done = export(Attend(**options).eval(), tmp_path / "m.onnx", x, fuse_attention=True, **given)
        assert done.operations["MultiHeadAttention"] == 1
        assert done.max_error < 1e-5
    for model, name in ((Attend(), "m.pt2"), (nn.Linear(24, 2), "m.onnx"), (Attend(enable_gqa=True), "m.onnx")):
        with pytest.raises(ValueError, match="fuse_attention"):
            export(model.eval(), tmp_path / name, x, fuse_attention=True)


def test_an_exported_file_takes_other_batch_sizes_and_lengths(tmp_path):
    import onnxruntime

    case, _, plain = folded("bert")
    done = export(plain, tmp_path / "model.onnx", outputs=case.outputs, **case.kwargs)
    assert not done.normalizing
    assert done.dynamic == {"input_ids": (0, 1), "attention_mask": (0, 1)}
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert [slot.name for slot in session.get_inputs()] == ["input_ids", "attention_mask"]
    assert [slot.name for slot in session.get_outputs()] == [*done.outputs] == ["logits"]
    more = {key: torch.cat([t, t, t[:1]]) for key, t in case.kwargs.items()}
    more = {key: torch.cat([t, t[:, :2]], 1) for key, t in more.items()}
    (out,) = session.run(None, {key: t.numpy() for key, t in more.items()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(out), plain(**more).logits, rtol=1e-4, atol=1e-5)
    onnx.checker.check_model(str(tmp_path / "model.onnx"))


def test_mappings_numbers_and_nested_inputs(tmp_path):
    def forward(m, x: Tensor, scale: float, more=None):
        y = m.head(m.norm(x))
        return {"logits": y * scale, "rest": (y, None)} if more is None else {"logits": y + more["bias"]}

    model = randomize(built(forward, norm=make("un", 4), head=nn.Linear(4, 2))).eval()
    x = torch.randn(3, 4)
    assert export(model, tmp_path / "a.onnx", x, 2.0).max_error < 1e-6
    assert export(model, tmp_path / "b.onnx", x, 2.0, more={"bias": torch.randn(3, 2)}).max_error < 1e-6
    one = export(model, tmp_path / "c.pt2", x, 2.0, outputs=lambda out: out["logits"])
    assert one.max_error < 1e-6
    total, given = built(lambda m, *xs: xs[0] + 2 * xs[1]).eval(), (x, torch.randn(3, 4, requires_grad=True))
    assert export(total, tmp_path / "d.onnx", *given).max_error < 1e-6


def test_a_file_that_is_wrong_replaces_none(tmp_path, monkeypatch):
    path, x = tmp_path / "m.pt2", torch.randn(2, 4)
    export(nn.Linear(4, 2).eval(), path, x)
    before = path.read_bytes()
    monkeypatch.setattr(sys.modules["normkit.models.export"], "error", lambda *given: 1.0)
    with pytest.raises(ValueError, match=r"m\.pt2"):
        export(nn.Linear(4, 2).eval(), path, x)
    assert [file.name for file in tmp_path.iterdir()] == ["m.pt2"]
    assert path.read_bytes() == before


def test_masks_leave_the_batch_open_and_no_operation(tmp_path):
    """A model that adds to its input in place, and also returns the size of the batch."""

    def forward(m, x, attention_mask=None):
        x += m.offset
        return m.linear(m.norm(x)), x.shape[0]

    model = built(forward, norm=nn.LayerNorm(8), linear=nn.Linear(8, 8), offset=nn.Parameter(torch.randn(8)))
    model = convert(model, "un", mask_from="attention_mask").eval()
    for batch in (4, 5):
        x, mask = torch.randn(batch, 5, 8), torch.ones(batch, 5, dtype=torch.bool)
        done = export(model, tmp_path / "model.pt2", x.clone(), attention_mask=mask)
        assert not done.operations.keys() & {"aten.__xor__", "aten.bitwise_not", "aten.to", "aten.t"}
        assert not done.operations.keys() & {"aten.any", "aten.where"}
        program = torch.export.load(tmp_path / "model.pt2").module()
        for other in (2, 5, 7):
            x, mask = torch.randn(other, 5, 8), torch.ones(other, 5, dtype=torch.bool)
            torch.testing.assert_close(program(x.clone(), mask), model(x.clone(), mask)[0])


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_outputs_have_the_names_of_the_model(ending, tmp_path):
    model = built(lambda m, x, y: {"x": m.head(x), "pair": (x + y, y)}, head=nn.Linear(3, 3)).eval()
    done = export(model, tmp_path / f"model.{ending}", torch.randn(2, 3), torch.randn(2, 3))
    assert done.outputs == ("x_out", "pair_0", "pair_1")
    if ending == "onnx":
        graph = onnx.load(str(tmp_path / "model.onnx")).graph
        assert [each.name for each in graph.output] == [*done.outputs]


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_an_axis_that_the_model_fixes_stays_fixed(ending, tmp_path):
    """Weights that mix tokens, as in MLP-Mixer, take one length."""
    model = built(lambda m, x: m.channels(m.tokens(x.mT).mT), tokens=nn.Linear(6, 6), channels=nn.Linear(8, 8)).eval()
    done = export(model, tmp_path / f"model.{ending}", torch.randn(3, 6, 8))
    assert done.dynamic == {"x": (0,)}
    assert done.max_error < 1e-6
    assert export(nn.Linear(4, 2).eval(), tmp_path / f"one.{ending}", torch.randn(3, 4), dynamic=False).dynamic == {}
    with pytest.warns(UserWarning, match="one sample"):
        assert export(nn.Linear(4, 2).eval(), tmp_path / f"row.{ending}", torch.randn(1, 4)).max_error < 1e-6


class Branching(nn.Module):
    """Its forward branches on the number of tokens."""

    def __init__(self, at):
        super().__init__()
        self.first, self.at = nn.Linear(8, 8), at

    def forward(self, x):
        y = self.first(x)[:, None]
        if self.at == 3:  # two ways to compute the same, and another one above
            y = y * 2 if x.shape[1] > self.at else y + y
            return y if x.shape[1] < 32 else y * 3
        if self.at:
            return y * 2 if x.shape[1] > self.at else y
        return F.scaled_dot_product_attention(y, y, y, is_causal=x.shape[1] > 1)


@pytest.mark.filterwarnings("ignore:.*takes other sizes")
def test_branches_on_lengths_limit_the_axis_or_fix_it(tmp_path):
    x = torch.randn(3, 6, 8)
    upper = export(Branching(64).eval(), tmp_path / "a.onnx", x)
    assert (upper.limits, upper.dynamic) == ({"x 1": (1, 64)}, {"x": (0, 1)})
    assert export(Branching(4).eval(), tmp_path / "b.pt2", x).limits == {"x 1": (5, None)}
    assert export(Branching(3).eval(), tmp_path / "b.pt2", x).limits == {"x 1": (4, 31)}, "which a .pt2 file holds to"
    assert export(Branching(3).eval(), tmp_path / "d.onnx", x).limits == {"x 1": (1, 31)}
    fixed = export(Branching(0).eval(), tmp_path / "c.onnx", x)
    assert (fixed.limits, fixed.dynamic) == ({}, {"x": (0,)})


def test_a_model_with_time_first_and_a_mask_keeps_its_axes_open(tmp_path):
    def forward(m, x, padding):
        return m.head(m.norm(x + m.attend(x, x, x, key_padding_mask=padding, need_weights=False)[0]))

    model = built(forward, attend=nn.MultiheadAttention(8, 2), norm=make("batch", 8), head=nn.Linear(8, 2)).eval()
    done = export(model, tmp_path / "m.onnx", torch.randn(6, 3, 8), torch.zeros(3, 6, dtype=torch.bool))
    assert done.dynamic == {"x": (0, 1), "padding": (0, 1)}


def test_bad_input_raises_before_anything_is_written(tmp_path, monkeypatch):
    model, x, path = nn.Sequential(make("un", 4), nn.Linear(4, 2)).eval(), torch.randn(2, 4), tmp_path / "m.pt2"
    (tmp_path / "folder.pt2").mkdir()
    for named, call in (
        ("training", lambda: export(nn.Linear(4, 2), path, x)),
        (r"m\.pb", lambda: export(model, tmp_path / "m.pb", x)),
        (r"folder\.pt2", lambda: export(model, tmp_path / "folder.pt2", x)),
        (r"float32\[2, 3\]", lambda: export(model, path, torch.randn(2, 3))),
        ("finite", lambda: export(model, path, x * float("nan"))),
        ("tensor", lambda: export(model, path, x, outputs=lambda out: None)),
        ("outputs=", lambda: export(model, path, x, outputs=lambda out: out.logits)),
        *(("tolerance", lambda t=t: export(model, path, x, tolerance=t)) for t in (-1.0, "low", float("nan"))),
    ):
        with pytest.raises((TypeError, ValueError), match=named):
            call()
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"normkit\[export\]"):
        export(model, tmp_path / "m.onnx", x)
    assert [file.name for file in tmp_path.iterdir()] == ["folder.pt2"]


# -- 8-bit integers ----------------------------------------------------------------------------------------------------


class Mixer(nn.Module):
    """Pre-norm blocks."""

    def __init__(self, width: int = 16, depth: int = 2):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])
        self.into, self.out = (nn.ModuleList([nn.Linear(width, width) for _ in range(depth)]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, into, out in zip(self.norms, self.into, self.out, strict=True):
            x = x + out(torch.relu(into(norm(x))))
        return x


@pytest.fixture(scope="module")
def mixer() -> nn.Module:
    torch.manual_seed(0)
    return fold(randomize(convert(Mixer(), "un")).eval(), torch.randn(4, 16))[0]


def test_bad_batches_and_formats_are_named(mixer, tmp_path):
    x, path = torch.randn(4, 16), tmp_path / "m.onnx"
    for named, given in (
        ("batch", []),
        (r"float32\[4, 8\]", [x, torch.randn(4, 8)]),
        (r"x=float32\[4, 16\]", [{"x": x}]),
        (r"int64\[4, 16\]", [x.long()]),
        ("NaN", [x, x / 0]),
        ("int8", True),
        ("int8", x),
    ):
        with pytest.raises((TypeError, ValueError), match=named):
            export(mixer, path, x, int8=given)
    with pytest.raises(ValueError, match=r"missing.m\.onnx"):
        export(mixer, tmp_path / "missing" / "m.onnx", x)
    with pytest.raises(ValueError, match="example"):
        export(mixer, path, x, dynamic=False, int8=[torch.randn(2, 16)])
    with pytest.raises(ValueError, match=r"m\.pt2"):
        export(mixer, tmp_path / "m.pt2", x, int8=[x])
    assert not path.exists()


def test_dynamic_integers_have_a_scale_for_each_channel_and_take_any_length(tmp_path):
    import onnxruntime

    case = case_of("bert")
    done = export(case.model, tmp_path / "m.onnx", outputs=case.outputs, int8="dynamic", **case.kwargs)
    assert done.cosine > 0.99, str(done)
    assert done.operations["MatMulInteger"] > 0
    graph = onnx.load(done.path).graph
    scales = [array.dims for array in graph.initializer if array.name.endswith("_scale") and array.dims]
    assert any(dims[0] > 1 for dims in scales)
    session = onnxruntime.InferenceSession(str(done.path))
    more = {key: torch.cat([t, t[:, :3]], 1).numpy() for key, t in case.kwargs.items()}
    assert session.run(None, more)[0].shape[1] == more["input_ids"].shape[1]


def test_weights_that_are_not_square_or_shared_are_quantized_dynamically(tmp_path):
    torch.manual_seed(0)
    square, embedding = nn.Linear(8, 8), nn.Embedding(8, 8)
    model = nn.Sequential(nn.Linear(8, 5, bias=False), nn.ReLU(), nn.Linear(5, 8), square, nn.Tanh(), square).eval()
    assert export(model, tmp_path / "m.onnx", torch.randn(4, 8), int8="dynamic").cosine > 0.99
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert {each.name for each in graph.initializer} <= {name for node in graph.node for name in node.input}
    tied = nn.Sequential(embedding, nn.Tanh(), nn.Linear(8, 8)).eval()
    tied[2].weight = embedding.weight
    assert export(tied, tmp_path / "m.onnx", torch.randint(8, (4,)), int8="dynamic").cosine > 0.99


def test_integers_far_from_the_model_are_a_warning(tmp_path):
    torch.manual_seed(0)
    model = nn.Linear(8, 5).eval()
    nn.init.zeros_(model.weight[:, 0].detach())
    x = torch.randn(4, 8)
    x[:, 0] = 1e4  # takes the whole range
    with pytest.warns(UserWarning, match="cosine"):
        assert export(model, tmp_path / "m.onnx", x, int8="dynamic").cosine < 0.9


@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_integers_are_in_the_products_alone_and_close_to_the_float_model(mixer, tmp_path):
    x, batches, read_by = torch.randn(4, 16), torch.randn(8, 4, 16), {}
    in_float = export(mixer, tmp_path / "float.onnx", x)
    assert in_float.cosine is None
    for scope in ("dynamic", "products"):
        done = export(mixer, tmp_path / "m.onnx", x, int8=scope if scope == "dynamic" else [*batches])
        assert in_float.max_error < 1e-4 < done.max_error < 0.2, str(done)
        assert done.cosine > 0.99, str(done)
        graph = onnx.load(done.path).graph
        dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        read_by[scope] = Counter(node.op_type for node in graph.node if dequantized.issuperset(node.input[:2]))
    assert read_by["products"]["Gemm"] == 4
    assert read_by["products"]["Add"] == 0
    assert list(tmp_path.glob("*prepared*")) == []


@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_integers_of_a_model_with_masks_whose_batches_name_their_inputs_in_another_order(tmp_path):
    case = case_of("bert")
    assert (case.kwargs["attention_mask"] == 0).any()
    given = {"int8": [dict(reversed(case.kwargs.items()))], "outputs": case.outputs}
    done = export(case.model, tmp_path / "m.onnx", **given, **case.kwargs)
    assert done.cosine > 0.99, str(done)
