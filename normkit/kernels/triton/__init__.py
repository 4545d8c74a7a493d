"""Triton kernels for CUDA devices, with the signatures of `reference.py`; imported on first use."""

from normkit.kernels.triton.columns import gradient, gradient_sums, moments, standardize
from normkit.kernels.triton.plans import plan
from normkit.kernels.triton.rows import group, layer, rms, scale

__all__ = ["gradient", "gradient_sums", "group", "layer", "moments", "plan", "rms", "scale", "standardize"]
