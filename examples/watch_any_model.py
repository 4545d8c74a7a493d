"""Measure in a LayerNorm model's training how far BatchNorm would be off in it.

A Transformer encoder of PyTorch learns the position of the largest digit in a sequence, on two kinds of batches: mixed
ones, and batches of one kind each (digits up to 3, up to 6, up to 9), as when text is bucketed by length. The model
stays as it is; the recorder keeps the statistics that BatchNorm would have had.
"""

import torch
from torch import nn

import normkit as nk


class Largest(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.embed = nn.Embedding(10, 32)
        self.places = nn.Parameter(torch.randn(12, 32) * 0.3)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(32), enable_nested_tensor=False)
        self.out = nn.Linear(32, 1)

    def forward(self, digits):
        return self.out(self.encoder(self.embed(digits) + self.places)).squeeze(-1)


def batch(sorted_by_kind: bool) -> torch.Tensor:
    kinds = torch.randint(3, (1 if sorted_by_kind else 64, 1)).expand(64, 1)
    return (torch.rand(64, 12) * (3 * kinds + 4)).long()


for sorted_by_kind in (False, True):
    torch.manual_seed(0)
    model = Largest()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    with nk.record(model, every=2) as rows:
        for _ in range(150):
            digits = batch(sorted_by_kind)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(digits), digits.argmax(1)).backward()
            optimizer.step()
    found = [f"finding: {finding}" for finding in nk.diagnose(rows)] + nk.watch.advise(rows)
    print("batches of one kind each" if sorted_by_kind else "mixed batches", *found, sep="\n    ")
