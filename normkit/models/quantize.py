"""Quantization of ONNX files by onnxruntime: dynamic, or static and calibrated on batches."""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from normkit.models.invoke import Call, arguments, describe

PRODUCTS = ["MatMul", "Gemm", "Conv"]  # by their names in ONNX


def calibration(given: Iterable[Any], example: Call, dynamic: bool) -> list[list[Tensor]]:
    """Return the tensors of each batch; a ValueError for one that does not fit the example."""
    leaves, form = tree_flatten(example)
    kinds = [_kind(leaf, dynamic) for leaf in leaves if isinstance(leaf, Tensor)]
    batches = []
    for number, (passed, named) in enumerate(map(arguments, given)):
        batch = Call(passed, {key: named[key] for key in example.kwargs if key in named} | named)  # in its order
        leaves, found = tree_flatten(batch)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if found != form or [_kind(t, dynamic) for t in inputs] != kinds:
            raise ValueError(
                f"batch {number} of int8= is {batch}; the example is {example}. "
                f"Pass batches in the form of the example{', of any batch size' if dynamic else ''}"
            )
        if broken := [t for t in inputs if not (t.isfinite() | t.isneginf()).all()]:  # a mask may be of -inf
            found = f"NaN or infinity in {describe(broken[0])}, which leaves integers without a range"
            raise ValueError(f"batch {number} of int8= has {found}; leave it out")
        batches.append(inputs)
    if not batches:
        raise ValueError("int8= has no batch; pass at least one to calibrate on")
    return batches


def _kind(t: Tensor, dynamic: bool) -> tuple[torch.dtype, torch.Size]:
    """Type and shape, the latter without the batch axis if that is dynamic."""
    return t.dtype, t.shape[dynamic and t.dim() > 0 :]


def quantize(source: Path, path: Path, feeds: Iterable[dict[str, Any]] | None) -> None:
    """Quantize an ONNX file by onnxruntime, with a scale for each output channel of a weight.

    Args:
        source: File in float.
        path: File to write.
        feeds: Inputs by name to calibrate on; None for dynamic quantization, which scales activations while it runs.
    """
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = source.with_suffix(".prepared.onnx")
    quant_pre_process(source, prepared, skip_symbolic_shape=True)
    graph = _renamed(prepared)
    # reduce_range: CPUs without VNNI saturate with weights of 8 bits; with a scale for each channel 7 suffice
    options = {"per_channel": True, "reduce_range": True, "weight_type": QuantType.QInt8}
    if feeds is None:
        quantize_dynamic(prepared, path, **options)
        return
    known = {slot.name for slot in graph.input}

    class Reader(CalibrationDataReader):
        left = ({name: array for name, array in feed.items() if name in known} for feed in feeds)

        def get_next(self) -> Any:
            return next(self.left, None)

    in_float = {"OpTypesToExcludeOutputQuantization": PRODUCTS, "DedicatedQDQPair": True}
    quantize_static(
        prepared, path, Reader(), op_types_to_quantize=PRODUCTS, activation_type=QuantType.QUInt8,
        extra_options=in_float, **options,
    )  # fmt: skip


def _renamed(path: Path) -> Any:
    """Rename what onnxruntime's fusion of products and biases named, and return the graph.

    The fusion runs again when the quantized file is loaded, and fails at names that it gave before. Dynamic
    quantization transposes the weight of each Gemm, so that shapes noted for weights go, and a Gemm gets a copy of a
    weight that others read, too: it would be transposed for them, or twice.
    """
    import onnx

    model = onnx.load(path)
    values = model.graph.initializer
    new = {value.name: f"fused_{number}" for number, value in enumerate(values) if value.name.startswith("gemm_")}
    for value in values:
        value.name = new.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [new.get(name, name) for name in node.input]
    by_name, uses = {value.name: value for value in values}, Counter(n for node in model.graph.node for n in node.input)
    for number, node in enumerate(node for node in model.graph.node if node.op_type == "Gemm"):
        if uses[name := node.input[1]] > 1 and name in by_name:
            values.append(by_name[name])
            values[-1].name = node.input[1] = f"copied_{number}"
            uses[name] -= 1  # the last one keeps the original
    weights = {value.name for value in values} | set(new)
    noted = [info for info in model.graph.value_info if info.name not in weights]
    del model.graph.value_info[:]
    model.graph.value_info.extend(noted)
    onnx.save(model, path)
    return model.graph
