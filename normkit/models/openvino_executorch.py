"""Export to OpenVINO (`.xml`) and ExecuTorch (`.pte`), in float and in integers."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from normkit.models.extras import needs
from normkit.models.quantize import Int8

Ran = tuple[dict[str, int], str, Any]  # operations with their counts, the runtime, its outputs
# pyright: reportMissingImports=false


def write_openvino(program: ExportedProgram, given: Sequence[Tensor], path: Path) -> Ran:
    """Write an OpenVINO model and run it in float32 (bfloat16 is the default on some CPUs)."""
    with needs("export() to OpenVINO", "openvino"):
        import openvino
    return _run_openvino(openvino.convert_model(program), given, path)


def quantize_openvino(
    source: Path, path: Path, given: Sequence[Tensor], batches: list[list[Tensor]], int8: Int8
) -> Ran:
    """Quantize an OpenVINO model by nncf, and run it."""
    with needs("export(int8=) to OpenVINO", "openvino"):
        import nncf
        import openvino
        from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, QuantizationParameters

    graph = openvino.Core().read_model(str(source))
    producers = [op.input_value(0).get_node() for op in graph.get_ops() if op.get_type_name() == "Softmax"]
    in_float = {op.get_friendly_name() for op in producers if op.get_type_name() == "Add"}  # masks
    in_float |= {op.get_friendly_name() for op in graph.get_ops() if op.get_type_name() == "Gather"}  # nncf fails there
    weights = QuantizationParameters(per_channel=int8.per_channel)
    quantized = nncf.quantize(
        graph,
        nncf.Dataset([[t.numpy() for t in batch] for batch in batches]),
        subset_size=len(batches),
        model_type=nncf.ModelType.TRANSFORMER if int8.scope == "products" else None,  # leaves sums in float
        ignored_scope=nncf.IgnoredScope(names=sorted(in_float)),
        advanced_parameters=AdvancedQuantizationParameters(weights_quantization_params=weights),
    )
    return _run_openvino(quantized, given, path)


def _run_openvino(graph: Any, given: Sequence[Tensor], path: Path) -> Ran:
    import openvino

    openvino.save_model(graph, str(path), compress_to_fp16=False)
    compiled = openvino.compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    out = compiled([t.numpy() for t in given])
    names = [op.get_type_name() for op in graph.get_ops()]
    counted = Counter(name for name in names if name not in ("Parameter", "Constant", "Result"))
    return dict(counted.most_common()), "openvino", [torch.from_numpy(out[i]) for i in range(len(graph.outputs))]


def quantize_executorch(
    program: ExportedProgram, given: Sequence[Tensor], path: Path, batches: list[list[Tensor]], int8: Int8
) -> Ran:
    """Quantize a program by torchao's PT2E for XNNPACK, write it, and run it."""
    with needs("export(int8=) to .pte", "executorch"):
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    def wanted(node: torch.fx.Node) -> bool:
        if int8.scope == "products":
            return any(part in str(node.target) for part in ("linear", "conv"))
        return not any("softmax" in str(user.target) for user in node.users)

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=int8.per_channel))
    with torch.no_grad():
        graph = prepare_for_xnnpack(program.module())
        prepared = prepare_pt2e(graph, quantizer.set_filter_function(wanted))
        for node in prepared.graph.nodes:  # the quantizer's constants are floats, also those added to positions
            if isinstance(value := node.meta.get("val"), Tensor) and not value.is_floating_point():
                for name in [str(each.target) for each in node.all_input_nodes]:
                    if name.startswith("_tensor_constant"):
                        setattr(prepared, name, getattr(prepared, name).long())
        for batch in batches:
            prepared(*batch)
        program = torch.export.export(convert_pt2e(prepared), tuple(given), strict=False)
        return write_executorch(program, given, path, pads=False)


def prepare_for_xnnpack(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Write products as `linear`, and leave out paddings by nothing.

    XNNPACK's quantizer takes no `addmm`, by which Hugging Face's `Conv1D` multiplies. A model whose windows fit the
    image, such as Swin, pads by nothing.
    """
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.target is aten.pad.default and not any(node.args[1]):
            node.replace_all_uses_with(node.args[0])
        elif node.target is aten.addmm.default and not node.kwargs:
            bias, x, weight = node.args
            with graph.graph.inserting_before(node):
                transposed = graph.graph.call_function(aten.t.default, (weight,))
                linear = graph.graph.call_function(aten.linear.default, (x, transposed, bias))
            transposed.meta["val"], linear.meta = weight.meta["val"].t(), dict(node.meta)
            node.replace_all_uses_with(linear)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def write_executorch(program: ExportedProgram, given: Sequence[Tensor], path: Path, *, pads: bool = True) -> Ran:
    """Write a program as an ExecuTorch file for XNNPACK, and run it.

    Shapes are fixed. The operations are those that XNNPACK does not take, and `executorch_call_delegate`, the number of
    pieces that it takes. XNNPACK has no LayerNorm, so each one splits the model. Without `pads` paddings stay outside
    of XNNPACK, which does not load those of integers.
    """
    with needs("export() to .pte", "executorch"):
        from executorch.backends.xnnpack.partition.config import ALL_PARTITIONER_CONFIGS
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
        from executorch.runtime import Runtime
    configs = [config for config in ALL_PARTITIONER_CONFIGS if pads or config.__name__ != "ConstantPadConfig"]
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner(configs=configs)])
    nodes = [node for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    names = [getattr(node.target, "__name__", str(node.target)) for node in nodes]
    path.write_bytes(lowered.to_executorch().buffer)
    out = Runtime.get().load_program(path).load_method("forward").execute(list(given))
    return dict(Counter(name for name in names if name != "getitem").most_common()), "executorch", out
