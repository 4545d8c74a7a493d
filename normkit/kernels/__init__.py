"""Numerics: no `nn.Module`, no method names.

Norms call `ops.py`, which chooses the implementation: `triton/` on a GPU, `native.py` (C++, `cpu/`) on a CPU, else
`reference.py`, which defines what all of them compute. `rule.py` has what a norm with batch statistics hands over.

The public function `normkit.kernels` hides this package as an attribute of `normkit`: import its modules with
`from normkit.kernels import ops`.
"""
