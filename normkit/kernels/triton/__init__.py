"""Triton kernels for CUDA devices, with the signatures of `reference.py`; imported on first use."""

from normkit.kernels.triton.columns import gradient, gradient_sums, moments, standardize
from normkit.kernels.triton.plans import plan
from normkit.kernels.triton.rows import row_norm, row_norm_grad

__all__ = ["gradient", "gradient_sums", "moments", "plan", "row_norm", "row_norm_grad", "standardize"]
