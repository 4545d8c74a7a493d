"""Helpers of the folding tests: norms far from the identity, readers, checks of a fold."""

import torch
from third_party_models import randomize
from torch import Tensor, nn

from normkit.norms import Norm, make
from normkit.transforms import fold

DIM = 6


def norm(spec: str = "batch", dim: int = DIM) -> Norm:
    """A norm that is far from the identity."""
    return randomize(nn.Sequential(make(spec, dim)))[0].eval()


def check(model: nn.Module, *example, actions: str | None = None, **options):
    """Fold; the outputs stay, in float32 too.

    The original is untouched. Returns the folded model and the report.
    """
    model = randomize(model).eval()
    before = {key: t.clone() for key, t in model.state_dict().items()}
    structure = str(model)
    folded, report = fold(model, *example, **options)
    assert report.max_error < 1e-12
    assert report.native_error < 1e-5
    for key, t in model.state_dict().items():
        torch.testing.assert_close(t, before[key], rtol=0, atol=0)
    assert str(model) == structure
    if actions is not None:
        assert [row.action for row in report] == actions.split(", "), str(report)
    return folded, report


class Read(nn.Module):
    """A norm and something that reads it."""

    def __init__(self, reader: nn.Module, forward=None, spec: str = "batch", dim: int = DIM):
        super().__init__()
        self.norm, self.reader, self._forward = make(spec, dim), reader, forward

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(torch.tanh(x))
        return self.reader(y) if self._forward is None else self._forward(self, y)


class Tied(nn.Module):
    """Embedding and output are one matrix."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(50, DIM), make("batch", DIM), nn.Linear(DIM, 50, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.embedding(ids))))
