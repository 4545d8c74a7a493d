"""Lightning, imported also where torchvision is installed in a build that does not fit PyTorch's.

Lightning imports torchmetrics, which imports torchvision where there is one. A torchvision built for CUDA fails beside
a PyTorch for CPUs, for want of two operators. Nothing here uses them, so it is enough that they are declared.
"""

import sys

import torch

OPERATORS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

try:
    import lightning.pytorch as lightning
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    declared = torch.library.Library("torchvision", "FRAGMENT")
    for name, signature in OPERATORS.items():
        if not hasattr(torch.ops.torchvision, name):
            declared.define(name + signature)
    for name in [name for name in sys.modules if name.split(".")[0] in ("lightning", "torchmetrics", "torchvision")]:
        del sys.modules[name]  # what the failure left half imported
    import lightning.pytorch as lightning

__all__ = ["lightning"]
