"""Numerics without state: no `nn.Module`, no method names.

`reference.py` has the arithmetic in plain PyTorch. `ops.py` offers the same operations to norms and runs each by the
implementation that `dispatch.py` selects: `triton/` on a GPU, `cpu/` (C++) or `fused.py` on a CPU, else the reference.

The public function `normkit.kernels` hides this package as an attribute of `normkit`: import its modules with
`from normkit.kernels import ops`.
"""
