"""Attention as one operation of onnxruntime, in place of products and a softmax.

The fusions of onnxruntime itself start at a LayerNorm and follow its inputs, so they find no attention in a model
without norms. Here the program's own operation is replaced, whatever stands around it.
"""

from typing import Any

import torch
from torch import Tensor

ATTENTION: Any = torch.ops.aten.scaled_dot_product_attention.default


def with_fused_attention(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Replace attention by `com.microsoft.MultiHeadAttention`; a ValueError if that cannot be."""
    fused = program.run_decompositions({ATTENTION: _multi_head})
    calls = sum(node.target is ATTENTION for node in program.graph.nodes)
    done = sum(str(node.target).startswith("onnx_symbolic") for node in fused.graph.nodes)
    if not calls or done < calls:
        found = f"{calls - done} of {calls} calls have grouped heads or other axes" if calls else "the model has none"
        advice = "Leave fuse_attention out, or load a model of transformers with attn_implementation='sdpa'"
        raise ValueError(f"fuse_attention= replaces scaled_dot_product_attention, and {found}. {advice}")
    return fused


def _multi_head(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Compute attention by an operation on `[batch, tokens, heads * width]`."""
    if query.dim() != 4 or key.shape[1] != query.shape[1] or (is_causal and query.shape[2] != key.shape[2]):
        return NotImplemented
    batch, heads, tokens = query.shape[:3]
    inputs: list[Tensor | None] = [t.transpose(1, 2).flatten(2) for t in (query, key, value)]
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, torch.finfo(query.dtype).min)
        shape = (*(1,) * (4 - attn_mask.dim()), *attn_mask.shape[:-2], tokens, key.shape[2])
        inputs += [None, None, attn_mask.to(query.dtype).expand(shape)]
    attributes: dict[str, Any] = {"num_heads": heads, "unidirectional": int(is_causal)}
    attributes |= {} if scale is None else {"scale": float(scale)}
    width = heads * value.shape[3]
    out = torch.onnx.ops.symbolic(
        "com.microsoft::MultiHeadAttention", inputs, attributes, dtype=query.dtype, shape=(batch, tokens, width),
        version=1,
    )  # fmt: skip
    return out.unflatten(2, (heads, -1)).transpose(1, 2)
