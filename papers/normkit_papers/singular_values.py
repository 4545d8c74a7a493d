"""Singular values of embeddings (PowerNorm, Figure 6)."""

import torch
from torch import Tensor, nn

from normkit.watch.rows import Row


@torch.no_grad()
def singular_values(weight: Tensor) -> Tensor:
    """Singular values of a matrix, the largest first and made 1 (PowerNorm, Figure 6).

    >>> singular_values(torch.diag(torch.tensor([1.0, 4.0]))).tolist()
    [1.0, 0.25]
    """
    values = torch.linalg.svdvals(weight.to(torch.promote_types(weight.dtype, torch.float32)))
    return values / values[0].clamp(min=torch.finfo(values.dtype).tiny)


def embedding_rows(model: nn.Module, step: int, points: int = 64) -> list[Row]:
    """Singular values of each embedding as rows `singular_value[i]`, at most `points`."""
    rows = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            values = singular_values(module.weight.detach()).tolist()
            count = min(points, len(values))
            indices = sorted({round(i * (len(values) - 1) / max(count - 1, 1)) for i in range(count)})
            rows += [Row(step, name, "", f"singular_value[{i}]", values[i]) for i in indices]
    return rows
