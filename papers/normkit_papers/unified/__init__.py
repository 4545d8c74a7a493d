"""Unified Normalization (Yang et al. 2022, arXiv:2208.01313)."""
