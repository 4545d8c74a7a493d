"""All operations that have Triton kernels, with the signatures of `kernels/reference.py`."""

from normkit.kernels.triton.columns import moments, standardize, standardize_grad
from normkit.kernels.triton.plan import plan
from normkit.kernels.triton.rows import group, layer, rms, scale

__all__ = ["group", "layer", "moments", "plan", "rms", "scale", "standardize", "standardize_grad"]
