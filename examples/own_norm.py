"""Two norms of your own: one of each token, one with statistics of batches.

Both convert, train and calibrate as the built-in ones; the second one folds. See docs/guides/add-a-norm.md.
"""

from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.norms import RowNorm, Stat, StatNorm


class L1Norm(RowNorm):
    """Divide each token by its mean absolute value to the power of an option."""

    power: float = 1.0

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = wide / (wide.abs().mean(-1, keepdim=True) ** self.power + self.eps)
        y = y if self.weight is None else y * self.weight
        y = y if self.bias is None else y + self.bias
        return y.to(x.dtype)


class HalfWay(StatNorm):
    """PN-V by the mean of the batch's statistics and the running ones; the gradient is PN-V's."""

    exact_grad = False

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor, state: Any) -> Stat:
        running = self.average(batch, state)
        return Stat((batch + running.to(batch.dtype)) / 2, {"running": running})


nk.NORMS["l1"] = L1Norm
nk.NORMS["halfway"] = HalfWay

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
student = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
for spec in ("layer", "l1(power=0.5)", "halfway"):
    model = nk.convert(student, spec)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(150):
        x = torch.randn(64, 32)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        loss.backward()
        optimizer.step()
    test = torch.randn(2048, 32)
    model.eval()
    with torch.no_grad():
        error = nn.functional.mse_loss(model(test), teacher(test))
    print(f"{spec:13} error {error:.4f}")
folded, report = nk.fold(model, test[:8])
print(report)
