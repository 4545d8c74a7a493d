"""A norm of your own: one rule, one row, and it converts, trains, calibrates and folds like those of the table.

This one divides by the mean of the batch's quadratic mean and the running one: half way to what inference will do.
"""

import torch
from torch import Tensor, nn

import normkit as nk
from normkit.norms import Stat, StatNorm


class HalfWay(StatNorm):
    """PN-V that meets its running statistics half way; the gradient is PN-V's."""

    alpha = 0.9
    exact_grad = False

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:
        running = self.average(batch)
        return Stat((batch + running.to(batch.dtype)) / 2, {"running": running})


nk.NORMS["halfway"] = HalfWay

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
student = nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 8))
for spec in ("layer", "halfway"):
    model = nk.convert(student, spec)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(300):
        x = torch.randn(64, 32)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), teacher(x).detach())
        loss.backward()
        optimizer.step()
    test = torch.randn(2048, 32)
    model.eval()
    with torch.no_grad():
        error = nn.functional.mse_loss(model(test), teacher(test))
    print(f"{spec:8} error {error:.4f}")
folded, report = nk.fold(model, test[:8])
print(report)
