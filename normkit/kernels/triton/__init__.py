"""GPU kernels behind the signatures of `ops/rows.py` and `ops/channels.py`; imported on first use."""

from normkit.kernels.triton.channels import moments, standardize, standardize_grad
from normkit.kernels.triton.rows import add_norm, group, group_rms, layer, rms, scale
from normkit.kernels.triton.rules import differentiate, train

LAYER_SCALE = False  # kernels of columns do not take `groups`

__all__ = [
    "LAYER_SCALE",
    "add_norm",
    "differentiate",
    "group",
    "group_rms",
    "layer",
    "moments",
    "rms",
    "scale",
    "standardize",
    "standardize_grad",
    "train",
]
