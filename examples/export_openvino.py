"""Run a folded Vision Transformer in OpenVINO: `pip install openvino timm`.

OpenVINO computes in bfloat16 on some CPUs by default; the hint below selects float32.
"""

import sys

import torch

import normkit as nk

try:
    import openvino
    import timm
except (ImportError, RuntimeError) as missing:
    print(f"not run: {missing}")
    sys.exit()

torch.manual_seed(0)
model = nk.convert(timm.create_model("test_vit"), "un").eval()  # train it before you fold it
image = torch.randn(2, 3, 160, 160)
folded, report = nk.fold(model, image)

graph = openvino.convert_model(torch.export.export(folded, (image,)))
compiled = openvino.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
with torch.no_grad():
    error = (torch.from_numpy(compiled([image.numpy()])[0]) - folded(image)).abs().max()
print(report.foldable, "norms folded; operations:", len(graph.get_ops()), "; largest difference", float(error))
