"""Lightning, imported also where torchvision is installed in a build that does not fit PyTorch's.

Lightning imports torchmetrics, which imports torchvision where there is one; so that one is made ready first.
"""

import importlib.util

from normkit.lab.models.torchvision_ops import load_torchvision

if importlib.util.find_spec("torchvision") is not None:
    load_torchvision()

import lightning.pytorch as lightning

__all__ = ["lightning"]
