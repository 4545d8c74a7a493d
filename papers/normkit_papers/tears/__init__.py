"""Transformers without Tears (Nguyen and Salazar 2019, arXiv:1910.05895)."""
