"""Random graphs of products, sums, ties and norms.

Folding is exact, and no larger set of norms could vanish.
"""

from itertools import combinations

import torch
from fold_cases import randomize
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import built
from torch import Tensor, nn

from normkit.fold import fold
from normkit.fold.relations import Relations
from normkit.fold.solve import Solver
from normkit.fold.survey import Survey
from normkit.models.invoke import Call
from normkit.norms import make

WIDTH = 3
OPERATIONS = ("linear", "norm", "norm", "gain", "sum", "sum", "scaled", "flipped", "tanh", "gated", "times", "again",
              "layer scale", "tied")  # fmt: skip


class Graph(nn.Module):
    """A model that carries out a list of operations, each on values that earlier ones gave."""

    def __init__(self, steps: list[tuple[str, int, int]], outputs: list[int]):
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.embedding = nn.Embedding(7, WIDTH)
        self.layers = nn.ModuleList([self._layer(kind) for kind, _, _ in steps])
        self.head = nn.Linear(WIDTH, 7, bias=False)
        for (kind, _, _), layer in zip(steps, self.layers, strict=True):
            if kind == "tied":
                layer.weight = self.embedding.weight

    def _layer(self, kind: str) -> nn.Module:
        if kind == "linear":
            return nn.Linear(WIDTH, WIDTH)
        if kind in ("norm", "gain"):
            return make("batch" if kind == "norm" else "un(bias=False)", WIDTH)
        if kind == "tied":
            return nn.Linear(WIDTH, 7, bias=False)
        gamma = nn.Parameter(torch.rand(WIDTH) + 0.5)
        return built(lambda m, x: x * m.gamma, gamma=gamma) if kind == "layer scale" else nn.Identity()

    def forward(self, ids: Tensor) -> list[Tensor]:
        values, given = [self.embedding(ids)], []
        for (kind, a, b), layer in zip(self.steps, self.layers, strict=True):
            x, y = values[a % len(values)], values[b % len(values)]
            if kind == "tied":
                given.append(layer(x))
                continue
            if kind == "again":  # an earlier layer once more
                earlier = self.layers[b % len(self.layers)]
                fits = isinstance(earlier, nn.Linear) and earlier.out_features == WIDTH
                layer = earlier if fits else nn.Identity()  # noqa: PLW2901
            operations = {"sum": lambda: x + y, "scaled": lambda: x * 0.5, "flipped": lambda: x.flip(-1),
                          "gated": lambda: x * torch.sigmoid(y), "times": lambda: x * y,
                          "tanh": lambda: torch.tanh(x)}  # fmt: skip
            values.append(operations.get(kind, lambda: layer(x))())
        return [*given, *(self.head(torch.tanh(values[k % len(values)])) for k in self.outputs), self.head(values[-1])]


steps = st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 20), st.integers(0, 20)), min_size=2, max_size=9)


def model_of(steps, outputs, negative: bool) -> Graph:
    torch.manual_seed(len(steps))
    model = randomize(Graph(steps, outputs)).eval()
    if negative:
        with torch.no_grad():
            for layer in model.layers:
                if hasattr(layer, "running"):
                    layer.weight[0] *= -1
    return model


@settings(max_examples=40, deadline=None, derandomize=True)
@given(steps, st.lists(st.integers(0, 20), max_size=2), st.booleans())
def test_random_graphs_fold_exactly(steps, outputs, negative):
    if not any(kind in ("norm", "gain") for kind, _, _ in steps):
        return
    model = model_of(steps, outputs, negative)
    ids = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(0))
    before = [t.clone() for t in model.state_dict().values()]
    folded, report = fold(model, ids)
    assert report.max_error < 1e-10, str(report)
    assert not any("not exact" in row.why for row in report), str(report)
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    for a, b in zip(folded(ids), model(ids), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    removed = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in folded.parameters())
    assert report.saved == removed, str(report)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(steps, st.lists(st.integers(0, 20), max_size=2))
def test_no_larger_set_of_norms_could_vanish(steps, outputs):
    if not 1 <= sum(kind in ("norm", "gain") for kind, _, _ in steps) <= 5:
        return
    model = model_of(steps, outputs, False)
    ids = torch.randint(7, (2, 5), generator=torch.Generator().manual_seed(0))
    survey = Survey(model, Call((ids,), {}), None, False, True, "fold")
    relations = Relations(survey.trace, survey.model, {})
    chosen = Solver(relations).choose(lambda name: True)
    names = [name for name in relations.norms if name not in relations.kept]
    largest = next(n for n in range(len(names), -1, -1)
                   for some in combinations(names, n) if possible(relations, some))  # fmt: skip
    assert len(chosen) == largest
    assert possible(relations, chosen)


def possible(relations: Relations, norms) -> bool:
    """Solve the dense linear systems of the logarithms of scales, and of the shifts."""
    size = relations.trace.codes
    scales, shifts = [unit(size, 0)], [unit(size, 0)]
    scale_of, shift_of = [0.0], [0.0]
    for link in relations.links:
        for a, b in zip(link.a.tolist(), link.b.tolist(), strict=True):
            if link.scale:
                scales.append(unit(size, a) - link.exponent * unit(size, b))
                scale_of.append(0.0)
            if link.shift:
                shifts.append(unit(size, a) - unit(size, b))
                shift_of.append(0.0)
    for row in relations.equations:
        for nodes, factors in zip(row.nodes.tolist(), row.factors.tolist(), strict=True):
            shifts.append(sum(f * unit(size, n) for n, f in zip(nodes, factors, strict=True)))
            shift_of.append(0.0)
    for node in (relations.norms[name] for name in norms):
        for x, y, a, b in zip(node.inputs.tolist(), node.outputs.tolist(), node.scale.tolist(), node.shift.tolist(),
                              strict=True):  # fmt: skip
            scales.append(unit(size, y) - unit(size, x))
            scale_of.append(float(torch.tensor(a, dtype=torch.float64).log()))
            shifts.append(unit(size, y) - a * unit(size, x))
            shift_of.append(b)
    return solvable(scales, scale_of) and solvable(shifts, shift_of)


def solvable(rows: list[Tensor], right: list[float]) -> bool:
    matrix, vector = torch.stack(rows), torch.tensor(right, dtype=torch.float64)[:, None]
    found = torch.linalg.lstsq(matrix, vector, driver="gelsd").solution
    return bool((matrix @ found - vector).abs().max() < 1e-9)


def unit(size: int, at: int) -> Tensor:
    row = torch.zeros(size, dtype=torch.float64)
    row[at] = 1.0
    return row
