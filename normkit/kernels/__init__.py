"""Numerics without state: no `nn.Module`, no method names."""
