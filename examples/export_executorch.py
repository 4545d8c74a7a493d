"""Write a folded model for phones, by ExecuTorch's XNNPACK backend: `pip install executorch`.

A LayerNorm that the backend does not take splits the program; a folded model can be one piece.
"""

import sys

import torch
from torch import nn

import normkit as nk

try:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
except ImportError as missing:
    print(f"not run: {missing}")
    sys.exit()

torch.manual_seed(0)
layers = [layer for _ in range(3) for layer in (nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU())]
model, x = nn.Sequential(*layers).eval(), torch.randn(4, 16)
folded, _ = nk.fold(nk.convert(model, "un").eval(), x)  # train it before you fold it
for name, each in (("LayerNorm", model), ("folded", folded)):
    lowered = to_edge_transform_and_lower(torch.export.export(each, (x,)), partitioner=[XnnpackPartitioner()])
    nodes = [node for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    pieces = sum("delegate" in str(node.target) for node in nodes)
    print(f"{name}: {pieces} pieces for XNNPACK, {len(lowered.to_executorch().buffer):,} bytes")
