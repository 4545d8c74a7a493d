"""Transformers of our own, with any norm at any place."""
