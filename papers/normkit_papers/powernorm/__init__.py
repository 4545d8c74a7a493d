"""PowerNorm (Shen et al. 2020, arXiv:2003.07845)."""
