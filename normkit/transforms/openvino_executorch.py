"""Export to OpenVINO (`.xml`) and to ExecuTorch with XNNPACK (`.pte`)."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Ran = tuple[dict[str, int], str, Any]  # operations with their counts, the runtime, its outputs


def write_openvino(model: nn.Module, given: Sequence[Tensor], path: Path, shapes: Any) -> Ran:
    """Write an OpenVINO model and run it in float32 (bfloat16 is the default on some CPUs)."""
    try:
        import openvino  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise ImportError("export() to OpenVINO needs openvino; pip install 'normkit[openvino]'") from missing
    with torch.no_grad():
        program = torch.export.export(model, tuple(given), dynamic_shapes=shapes, strict=False)
    graph = openvino.convert_model(program)
    openvino.save_model(graph, str(path), compress_to_fp16=False)
    compiled = openvino.compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    out = compiled([t.numpy() for t in given])
    names = [op.get_type_name() for op in graph.get_ops()]
    counted = Counter(name for name in names if name not in ("Parameter", "Constant", "Result"))
    return dict(counted.most_common()), "openvino", [torch.from_numpy(out[i]) for i in range(len(graph.outputs))]


def write_executorch(model: nn.Module, given: Sequence[Tensor], path: Path) -> Ran:
    """Write an ExecuTorch program for XNNPACK, and run it.

    Shapes are fixed. The operations are those that XNNPACK does not take, and `executorch_call_delegate`, the number of
    pieces that it takes. XNNPACK has no LayerNorm, so each one splits the model.
    """
    try:
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import (  # pyright: ignore[reportMissingImports]
            XnnpackPartitioner,
        )
        from executorch.exir import to_edge_transform_and_lower  # pyright: ignore[reportMissingImports]
        from executorch.runtime import Runtime  # pyright: ignore[reportMissingImports]
    except ImportError as missing:
        raise ImportError(f"export() to .pte needs {missing.name}; pip install 'normkit[executorch]'") from missing
    with torch.no_grad():
        program = torch.export.export(model, tuple(given), strict=False)
    lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    nodes = [node for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    names = [getattr(node.target, "__name__", str(node.target)) for node in nodes]
    path.write_bytes(lowered.to_executorch().buffer)
    out = Runtime.get().load_program(path).load_method("forward").execute(list(given))
    return dict(Counter(name for name in names if name != "getitem").most_common()), "executorch", out
