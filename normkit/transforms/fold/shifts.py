"""The shifts of the coordinates: `t` that satisfy the rows of all norms that are folded.

Channels that are connected by rows form a system of their own. Most systems of a model have the same structure (one for
each channel of its stream): they are solved together, with one number per system, a *lane*, in place of every number.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from normkit.transforms.fold.relations import Link, Relations, Row, united
from normkit.transforms.fold.trace import Source

Expression = dict[int, Tensor]  # variable: its factor in every lane; the key CONSTANT: the constant
CONSTANT = -1
OPTIONAL = "optional"  # in place of a norm: a row that is met if that takes no new bias
ROUNDING = 1e-14  # a shift below this part of the largest is a rounding error
PIVOT = 1e-6  # a factor below this part of the largest is no pivot


@dataclass(eq=False)
class System:
    """Systems of equal structure, a lane each.

    `nodes` are the variables, `[lanes, variables]`; `rank` is the cost of moving each.
    """

    nodes: Tensor
    rank: list[int]
    rows: list[tuple[str, list[int], Tensor, Tensor]] = field(
        default_factory=list
    )  # norm, variables, factors, constant
    solved: dict[frozenset[str], dict[int, Expression] | None] = field(default_factory=dict)

    @property
    def norms(self) -> set[str]:
        """The norms that have rows here."""
        return {row[0] for row in self.rows} - {"", OPTIONAL}

    def solve(self, norms: frozenset[str]) -> dict[int, Expression] | None:
        """The variables in terms of the free ones; None if the rows contradict each other."""
        norms = norms & self.norms
        if norms not in self.solved:
            self.solved[norms] = self._eliminate(norms)
        return self.solved[norms]

    def _eliminate(self, norms: frozenset[str]) -> dict[int, Expression] | None:
        solved: dict[int, Expression] = {}
        for norm, variables, factors, constant in self.rows:
            if norm not in norms and norm not in ("", OPTIONAL):
                continue
            row: Expression = {CONSTANT: -constant}
            for variable, factor in zip(variables, factors, strict=True):
                for each, share in solved.get(variable, {variable: torch.ones_like(factor)}).items():
                    row[each] = row[each] + factor * share if each in row else factor * share
            largest = max([1.0, *(float(factor.abs().max()) for factor in row.values())])
            row = {each: factor for each, factor in row.items() if bool((factor.abs() > 1e-11 * largest).any())}
            unknown = [each for each in row if each != CONSTANT]
            if not unknown:
                if norm != OPTIONAL and CONSTANT in row and bool((row[CONSTANT].abs() > 1e-9 * largest).any()):
                    return None
                continue
            largest = torch.stack([row[each].abs() for each in unknown]).amax(0)
            pivots = [each for each in unknown if bool((row[each].abs() > PIVOT * largest).all())]
            if norm == OPTIONAL:
                pivots = [each for each in pivots if self.rank[each] != 2]
            if not pivots:
                if norm == OPTIONAL:
                    continue
                return None
            pivot = min(pivots, key=lambda each: (self.rank[each], -each))
            by = row.pop(pivot)
            expression = {each: -factor / by for each, factor in row.items()}
            for other in solved.values():
                if pivot in other:
                    share = other.pop(pivot)
                    for each, factor in expression.items():
                        other[each] = other[each] + share * factor if each in other else share * factor
            solved[pivot] = expression
        return solved


class Shifts:
    """All systems of a trace."""

    def __init__(self, relations: Relations, rows: list[Row]):
        size = relations.trace.codes
        self.forest = united(size, [Link(link.a, link.b) for link in relations.links if link.shift])
        rows = sorted((row for row in rows if len(row.nodes)), key=lambda row: int(row.nodes[0, 0]))
        rows += [Row(n[:, None], torch.ones(len(n), 1).double(), torch.zeros(len(n)).double(), OPTIONAL)
                 for n in relations.unshifted]  # fmt: skip
        fixed = [(row.norm, (self.forest.root[row.nodes] == 0).all(1) & (row.constant != 0)) for row in rows]
        self.never = {norm for norm, at in fixed if bool(at.any())}  # a shift where both ends have none
        self.systems = self._systems(rows, self._ranks(relations))

    def consistent(self, norms: frozenset[str]) -> bool:
        """True if there are shifts with which all these norms can be folded."""
        return not norms & self.never and all(system.solve(norms) is not None for system in self.systems)

    def values(self, norms: frozenset[str]) -> Tensor:
        """The shift of every node; free ones are zero."""
        values = torch.zeros(len(self.forest.root), dtype=torch.float64)
        for system in self.systems:
            for variable, expression in (system.solve(norms) or {}).items():
                if CONSTANT in expression:
                    values[system.nodes[:, variable]] = expression[CONSTANT]
        values[values.abs() <= ROUNDING * values.abs().max()] = 0.0
        return values[self.forest.root]

    def _ranks(self, relations: Relations) -> Tensor:
        """The cost of a shift: 0 nothing, 1 an existing bias, 2 a bias to be made, 3 a table."""
        ranks = torch.zeros(relations.trace.codes, dtype=torch.long)
        for source in relations.trace.sources.values():
            ranks[source.base : source.base + source.size] = _rank(source, relations)
        return torch.zeros_like(ranks).scatter_reduce_(0, self.forest.root, ranks, "amax")

    def _systems(self, rows: list[Row], ranks: Tensor) -> list[System]:
        roots = [self.forest.root[row.nodes] for row in rows]
        pairs = [(nodes[:, 0], nodes[:, k]) for nodes in roots for k in range(1, nodes.shape[1])]
        pairs += [(nodes[:, j], nodes[:, k]) for nodes in roots for j in range(1, nodes.shape[1]) for k in range(1, j)]
        links = [Link(a[(a > 0) & (b > 0)], b[(a > 0) & (b > 0)]) for a, b in pairs]
        whole = united(len(self.forest.root), links).root
        moved = torch.zeros(len(whole), dtype=torch.bool)
        of_row = [whole[nodes.amax(1)] for nodes in roots]
        for row, system in zip(rows, of_row, strict=True):
            moved[system[row.constant != 0]] = True
        return [
            system
            for lanes in self._alike(roots, of_row, whole, moved, ranks)
            for system in [self._system(lanes, rows, roots, of_row, whole, ranks)]
        ]

    def _alike(self, roots: list[Tensor], of_row: list[Tensor], whole: Tensor, moved: Tensor, ranks: Tensor) -> list:
        """The systems that have to move, grouped by their structure."""
        members = (moved[whole] & (torch.arange(len(whole)) == self.forest.root)).nonzero().flatten()
        members = members[members > 0]
        self.local = _positions(whole[members], members, len(whole))
        signature = torch.zeros(len(whole), dtype=torch.long)
        signature.index_add_(0, whole[members], _mixed(self.local[members] * 8 + ranks[members] + 5))
        for block, (nodes, system) in enumerate(zip(roots, of_row, strict=True)):
            key = torch.full((len(nodes),), block + 1)
            for k in range(nodes.shape[1]):
                key = _mixed(key + torch.where(nodes[:, k] > 0, self.local[nodes[:, k]] + 1, 0))
            signature.index_add_(0, system, torch.where(moved[system], key, 0))
        lanes = whole[members].unique()
        if not len(lanes):
            return []
        _, group = signature[lanes].unique(return_inverse=True)
        return [lanes[group == each] for each in range(int(group.max()) + 1)]

    def _system(self, lanes: Tensor, rows: list[Row], roots: list[Tensor], of_row: list[Tensor], whole: Tensor,
                ranks: Tensor) -> System:  # fmt: skip
        lane_of = torch.full((len(whole),), -1, dtype=torch.long)
        lane_of[lanes] = torch.arange(len(lanes))
        members = ((lane_of[whole] >= 0) & (torch.arange(len(whole)) == self.forest.root)).nonzero().flatten()
        members = members[members > 0]
        order = torch.argsort(lane_of[whole[members]], stable=True)
        nodes = members[order].view(len(lanes), -1)
        system = System(nodes, ranks[nodes[0]].tolist())
        for row, mapped, of in zip(rows, roots, of_row, strict=True):
            own = (lane_of[of] >= 0).nonzero().flatten()
            if not len(own):
                continue
            local = torch.where(mapped[own] > 0, self.local[mapped[own]], -1)
            key = torch.zeros(len(own), dtype=torch.long)
            for k in range(local.shape[1]):
                key = key * (nodes.shape[1] + 1) + local[:, k] + 1
            order = torch.argsort(key, stable=True)
            order = order[torch.argsort(lane_of[of[own]][order], stable=True)]
            own, local = own[order].view(len(lanes), -1), local[order].view(len(lanes), -1, local.shape[1])
            if not bool((local == local[:1]).all()):
                raise AssertionError("systems of one group differ in structure")
            for index in range(own.shape[1]):
                used = [k for k in range(local.shape[2]) if int(local[0, index, k]) >= 0]
                factors = row.factors[own[:, index]].T[used]
                variables = [int(local[0, index, k]) for k in used]
                system.rows.append((row.norm, variables, factors, row.constant[own[:, index]]))
        return system


def _positions(groups: Tensor, members: Tensor, size: int) -> Tensor:
    """The position of each member among those of its group, by node."""
    order = torch.argsort(groups, stable=True)
    _, counts = groups[order].unique_consecutive(return_counts=True)
    starts = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    local = torch.zeros(size, dtype=torch.long)
    local[members[order]] = torch.arange(len(order)) - starts
    return local


def _mixed(key: Tensor) -> Tensor:
    """A hash of whole numbers; it wraps around."""
    key = (key ^ (key >> 29)) * -4658895280553007687
    return (key ^ (key >> 32)) * -7723592293110705685


def _rank(source: Source, relations: Relations) -> int:
    if source.product is None:
        return 0
    if source.product.adds:
        return 3
    return 1 if source.product in relations.trace.biases else 2
