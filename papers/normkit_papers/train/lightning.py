"""Import Lightning, also beside a build of torchvision that does not match PyTorch.

Lightning imports torchmetrics, which imports torchvision if it is installed; so torchvision is prepared first.
"""

import importlib.util

from normkit_papers.models.torchvision_ops import load_torchvision

if importlib.util.find_spec("torchvision") is not None:
    load_torchvision()

import lightning.pytorch as lightning

__all__ = ["lightning"]
