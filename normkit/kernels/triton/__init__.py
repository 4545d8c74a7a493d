"""Triton kernels for CUDA devices; `dispatch.load_triton` imports them on first use."""
