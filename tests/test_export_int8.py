"""Exports in 8-bit integers: calibrated, close to the float model, masks in float."""

from collections import Counter

import onnx
import pytest
import torch
from third_party_models import case_of, randomize
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models import convert, export
from normkit.models.invoke import Call
from normkit.models.quantize import calibration


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


def test_keywords_of_a_batch_may_come_in_any_order():
    ids, mask = torch.ones(2, 3), torch.zeros(2, 3)
    batches = calibration([{"mask": mask, "ids": ids}], Call((), {"ids": ids, "mask": mask}), dynamic=True)
    assert batches[0][0] is ids
    assert batches[0][1] is mask


@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_integers_are_close_to_the_float_model(mixer, tmp_path):
    x, batches = torch.randn(4, 16), torch.randn(8, 4, 16)
    in_float = export(mixer, tmp_path / "float.onnx", x)
    assert in_float.cosine is None
    for int8, stream in (("dynamic", False), ([*batches], False), ([*batches], True)):
        done = export(mixer, tmp_path / "int8.onnx", x, int8=int8, stream=stream)
        assert in_float.max_error < 1e-4 < done.max_error < 0.2, str(done)
        assert done.cosine > 0.99, str(done)
        assert done.path.stat().st_size > 0
    assert list(tmp_path.glob("*prepared*")) == []


def test_the_scope_selects_what_computes_in_integers(mixer, tmp_path):
    read_by = {}
    for scope in ("products", "stream"):
        done = export(
            mixer, tmp_path / "m.onnx", torch.randn(4, 16), int8=[*torch.randn(2, 4, 16)], stream=scope == "stream"
        )
        graph = onnx.load(done.path).graph
        dequantized = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
        read_by[scope] = Counter(node.op_type for node in graph.node if dequantized.issuperset(node.input[:2]))
        assert done.operations["QuantizeLinear"] > 0
    assert read_by["products"]["Gemm"] == 4
    assert read_by["products"]["Add"] == 0
    assert read_by["stream"]["Add"] == 2


def test_an_attention_mask_stays_in_float(tmp_path):
    case = case_of("bert")
    given = {"int8": [case.kwargs], "stream": True, "outputs": case.outputs}
    done = export(case.model.eval(), tmp_path / "m.onnx", **given, **case.kwargs)
    assert (case.kwargs["attention_mask"] == 0).any()
    assert done.cosine > 0.99, str(done)


class Positions(nn.Module):
    """Adds embeddings of tokens and of positions, which it counts from 1."""

    def __init__(self):
        super().__init__()
        self.tokens, self.places, self.out = nn.Embedding(10, 16), nn.Embedding(10, 16), nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]) + 1))


@pytest.mark.filterwarnings("ignore")  # the exporters' own
def test_sums_of_positions_stay_integers(tmp_path):
    torch.manual_seed(0)
    tokens = torch.randint(0, 10, (4, 6))
    for scope in ("products", "stream"):
        done = export(Positions().eval(), tmp_path / f"{scope}.onnx", tokens, int8=[tokens], stream=scope == "stream")
        assert done.cosine > 0.99, str(done)


def test_bad_batches_and_formats_are_named(mixer, tmp_path):
    x, path = torch.randn(4, 16), tmp_path / "m.onnx"
    with pytest.raises(ValueError, match="no batch"):
        export(mixer, path, x, int8=[])
    with pytest.raises(ValueError, match=r"batch 1 of int8= is \(float32\[4, 8\]\); the example is \(float32\[4, 16\]"):
        export(mixer, path, x, int8=[x, torch.randn(4, 8)])
    with pytest.raises(ValueError, match=r"is \(x=float32\[4, 16\]\); the example is \(float32\[4, 16\]\). Pass"):
        export(mixer, path, x, int8=[{"x": x}])
    with pytest.raises(ValueError, match=r"batch 0 of int8= is \(int64\[4, 16\]\)"):
        export(mixer, path, x, int8=[x.long()])
    with pytest.raises(ValueError, match=r"batch 0 of int8= is \('words'\)"):
        export(mixer, path, x, int8=["words"])
    with pytest.raises(ValueError, match=r"batch 1 of int8= has NaN or infinity in float32\[4, 16\]"):
        export(mixer, path, x, int8=[x, x / 0])
    for wrong in (True, "words", x):
        with pytest.raises((TypeError, ValueError), match="int8"):
            export(mixer, path, x, int8=wrong)
    with pytest.raises(ValueError, match=r"missing.m\.onnx is in no folder; make it first"):
        export(mixer, tmp_path / "missing" / "m.onnx", x)
    with pytest.raises(ValueError, match="form of the example"):
        export(mixer, path, x, dynamic=False, int8=[torch.randn(2, 16)])
    with pytest.raises(ValueError, match="stream"):
        export(mixer, path, x, int8="dynamic", stream=True)
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


def test_weights_that_are_not_square_are_quantized_dynamically(tmp_path):
    torch.manual_seed(0)
    for model in (nn.Linear(8, 2), nn.Sequential(nn.Linear(8, 5, bias=False), nn.ReLU(), nn.Linear(5, 3))):
        assert export(model.eval(), tmp_path / "m.onnx", torch.randn(4, 8), int8="dynamic").cosine > 0.99
