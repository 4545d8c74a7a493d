"""Muon for the matrices of a model's blocks, and AdamW for all other parameters, as one optimizer."""

from typing import Any

import torch
from torch import nn


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for matrices of linear layers, AdamW for the rest.

    Updates of matrices are scaled to the size of AdamW's (`match_rms_adamw`), so both use one learning rate. Embeddings
    and linear layers whose name begins with `output` are left to AdamW, as the authors advise.

    >>> optimizer = MuonWithAdamW(nn.Linear(2, 2), 0.1, 0.95, (0.9, 0.98), 0.0)
    >>> [len(group["params"]) for group in optimizer.param_groups]
    [1, 0, 1]
    """

    def __init__(self, model: nn.Module, lr: float, momentum: float, betas: tuple[float, float], weight_decay: float):
        muon, matrices, vectors = list[nn.Parameter](), list[nn.Parameter](), list[nn.Parameter]()
        tables = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
        for name, parameter in model.named_parameters():
            inner = parameter.dim() == 2 and parameter not in tables and not name.startswith("output")
            (muon if inner else matrices if parameter.dim() > 1 else vectors).append(parameter)
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(muon, lr=lr, momentum=momentum, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True),
        )
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        self.param_groups = [group for part in self.parts for group in part.param_groups]
