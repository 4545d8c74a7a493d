"""GPU kernels behind the signatures of `ops/rows.py` and `ops/channels.py`; imported on first use."""

from normkit.ops.triton.channels import moments, standardize, standardize_grad
from normkit.ops.triton.rows import add_norm, group, group_rms, layer, rms, scale
from normkit.ops.triton.rules import differentiate, train

__all__ = [
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
