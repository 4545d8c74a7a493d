"""Helpers of the folding tests: readers of a norm, checks of a fold."""

import torch
from third_party_models import randomize
from torch import Tensor, nn

from normkit.fold import fold
from normkit.models.difference import error
from normkit.norms import make

DIM = 6


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


class Two(nn.Module):
    """A norm and two layers, combined by `how(norm's output, a, b, ...)`."""

    def __init__(self, how, spec: str = "batch"):
        super().__init__()
        self.norm, self.a, self.b, self.how = make(spec, DIM), nn.Linear(DIM, 4), nn.Linear(DIM, 4), how

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.how(self.norm(torch.tanh(x)), self.a, self.b, *rest)


def both_agree(model: Two, example: tuple, later: tuple, actions: str) -> str:
    """As `both_agree_on`; why the norm became what it is."""
    return both_agree_on(model, example, later, actions)[1].rows[0].why


def both_agree_on(model: nn.Module, example: tuple, later: tuple, actions: str | None = None):
    """Fold by an example, compare on another input; the folded model and the report."""
    folded, report = check(model, *example, actions=actions)
    with torch.no_grad():
        assert error(folded(*later), model(*later)) < 1e-5
    return folded, report
