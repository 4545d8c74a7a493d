"""Lets torchvision be imported where its build does not fit that of torch.

A torchvision for CUDA beside a torch for CPUs fails at import, as two operators are not registered; transformers and
timm then fail with it. Classifiers need the schemas of these operators alone.
"""

import torch

_library = torch.library.Library("torchvision", "FRAGMENT")  # kept: its definitions end with it


def load_torchvision() -> object:
    """Import torchvision, after declaring the operators that its build lacks."""
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            _library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision

    return torchvision
