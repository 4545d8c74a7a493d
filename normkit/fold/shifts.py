"""The shifts of the coordinates: `t` that satisfy the equations of all folded norms.

Channels that are connected by equations form a system of their own. Most systems of a model have the same structure
(one for each channel of its stream). They are solved together: a coefficient has one entry, a *lane*, per system. With
each goes its magnitude, the sum of the absolute values that it was made of: what is tiny beside that is a rounding
error, and what is merely small, as the gain of a channel that weight decay switched off, is not.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

import torch
from torch import Tensor

from normkit.fold.relations import Equation, Link, Relations, equation, united

Expression = dict[int, Tensor]  # variable: its factor, [2, lanes]; the key CONSTANT: the constant
CONSTANT = -1
OPTIONAL = "optional"  # in place of a norm: an equation that is met if that takes no new bias
ROUNDING = 1e-13  # a number below this part of the magnitudes that were added to it is a rounding error
PIVOT = 1e-6  # a factor below this part of the largest is no pivot


@dataclass(eq=False)
class System:
    """Systems of equal structure, a lane each.

    `nodes` are the variables, `[lanes, variables]`; `rank` is the cost of moving each. An equation is a norm,
    variables, their factors `[variables, lanes]` and the constant `[lanes]`.
    """

    nodes: Tensor
    rank: tuple[int, ...]
    equations: list[tuple[str, list[int], Tensor, Tensor]] = field(default_factory=list)
    solved: dict[frozenset[str], dict[int, Expression] | None] = field(default_factory=dict)

    @property
    def norms(self) -> set[str]:
        """The norms that have equations here."""
        return {norm for norm, *_ in self.equations} - {"", OPTIONAL}

    def solve(self, norms: frozenset[str]) -> dict[int, Expression] | None:
        """The variables in terms of the free ones; None if the equations contradict each other."""
        norms = norms & self.norms
        if norms not in self.solved:
            self.solved[norms] = self._eliminate(norms)
        return self.solved[norms]

    def _eliminate(self, norms: frozenset[str]) -> dict[int, Expression] | None:
        solved: dict[int, Expression] = {}
        for norm, variables, factors, constant in self.equations:
            if norm not in norms and norm not in ("", OPTIONAL):
                continue
            row: Expression = {CONSTANT: _sized(-constant)}
            for variable, factor in zip(variables, factors, strict=True):
                _add(row, solved.get(variable, {variable: _sized(torch.ones_like(factor))}), _sized(factor))
            contradicts = bool((row[CONSTANT][0].abs() > 1e-9 * row[CONSTANT][1]).any())
            row = {each: factor for each, factor in row.items() if not bool(_is_rounding(factor, 1e-11).all())}
            unknown = [each for each in row if each != CONSTANT]
            if not unknown:
                if norm != OPTIONAL and contradicts:
                    return None
                continue
            largest = torch.stack([row[each][0].abs() for each in unknown]).amax(0)
            pivots = [each for each in unknown if bool((row[each][0].abs() > PIVOT * largest).all())]
            if norm == OPTIONAL:
                pivots = [each for each in pivots if self.rank[each] != 2]
            if not pivots:
                if norm == OPTIONAL:
                    continue
                return None
            pivot = min(pivots, key=lambda each: (self.rank[each], -each))
            by = row.pop(pivot)[0]
            expression = {each: factor * _sized(-1 / by) for each, factor in row.items()}
            for other in solved.values():
                if pivot in other:
                    _add(other, expression, other.pop(pivot))
            solved[pivot] = expression
        return solved


def _sized(values: Tensor) -> Tensor:
    """Numbers and their magnitudes, `[2, lanes]`, which bound errors of rounding."""
    return torch.stack([values, values.abs()])


def _is_rounding(values: Tensor, part: float = ROUNDING) -> Tensor:
    """True where a number is so small beside the magnitudes it was made of that it may be zero."""
    return values[0].abs() <= part * values[1]


def _add(to: Expression, terms: Expression, factor: Tensor) -> None:
    """Add a multiple of other terms to an expression."""
    for variable, share in terms.items():
        to[variable] = to.get(variable, 0.0) + factor * share


class Shifts:
    """All systems of a trace."""

    def __init__(self, relations: Relations, equations: list[Equation]):
        size = relations.trace.codes
        self.forest = united(size, [Link(link.a, link.b) for link in relations.links if link.shift])
        equations = sorted((each for each in equations if len(each.nodes)), key=lambda each: int(each.nodes[0, 0]))
        equations += [equation((nodes, 1.0), norm=OPTIONAL) for nodes in relations.unshifted]
        fixed = [(each.norm, (self.forest.root[each.nodes] == 0).all(1) & (each.constant != 0)) for each in equations]
        self.never = {norm for norm, at in fixed if bool(at.any())}  # a shift where both ends have none
        self.systems = self._systems(equations, self._ranks(relations))

    def consistent(self, norms: frozenset[str]) -> bool:
        """True if there are shifts with which all these norms can be folded."""
        return not norms & self.never and all(system.solve(norms) is not None for system in self.systems)

    def values(self, norms: frozenset[str]) -> Tensor:
        """The shift of every node; free ones are zero."""
        values = torch.zeros(len(self.forest.root), dtype=torch.float64)
        for system in self.systems:
            for variable, expression in (system.solve(norms) or {}).items():
                if CONSTANT in expression:
                    constant = expression[CONSTANT]
                    values[system.nodes[:, variable]] = torch.where(_is_rounding(constant), 0.0, constant[0])
        return values[self.forest.root]

    def _ranks(self, relations: Relations) -> Tensor:
        """The cost of a shift: 0 nothing, 1 an existing bias, 2 a bias to be made, 3 a table."""
        ranks = torch.zeros(relations.trace.codes, dtype=torch.long)
        for product, nodes in relations.outputs.items():
            if product.kind != "gain":
                ranks[nodes] = 3 if product.takes_shift else 1 if product in relations.trace.biases else 2
        return torch.zeros_like(ranks).scatter_reduce_(0, self.forest.root, ranks, "amax")

    def _systems(self, equations: list[Equation], ranks: Tensor) -> list[System]:
        """All systems that have to move, because an equation of theirs has a constant."""
        roots = [self.forest.root[each.nodes] for each in equations]
        links = [Link(a, b).followed for nodes in roots for a, b in combinations(nodes.unbind(1), 2)]
        whole = united(len(self.forest.root), links).root
        system_of = [whole[nodes.amax(1)] for nodes in roots]
        moved = torch.zeros(len(whole), dtype=torch.bool)
        for each, system in zip(equations, system_of, strict=True):
            moved[system[each.constant != 0]] = True
        moved[0] = False
        lines: dict[int, list[Line]] = defaultdict(list)
        for k, (system, nodes) in enumerate(zip(system_of, roots, strict=True)):
            at = moved[system].nonzero().flatten()
            for place, of, read in zip(at.tolist(), system[at].tolist(), nodes[at].tolist(), strict=True):
                lines[of].append((k, place, read))
        return _lanes(lines.values(), equations, ranks)


Line = tuple[int, int, list[int]]  # of a system: the index of an Equation, the place in its tensors, the nodes there


def _lanes(systems: Iterable[list[Line]], equations: list[Equation], ranks: Tensor) -> list[System]:
    """Make systems of the same structure the lanes of one."""
    alike: dict[tuple, list[tuple[list[int], list[int]]]] = defaultdict(list)  # by structure: nodes, places of lines
    for lines in systems:
        nodes = sorted({node for *_, read in lines for node in read} - {0})
        variable = {0: -1} | {node: v for v, node in enumerate(nodes)}
        ordered = sorted((k, tuple(variable[node] for node in read), place) for k, place, read in lines)
        structure = tuple(ranks[nodes].tolist()), tuple((k, variables) for k, variables, _ in ordered)
        alike[structure].append((nodes, [place for *_, place in ordered]))
    result = []
    for (rank, structure), lanes in alike.items():
        system = System(torch.tensor([nodes for nodes, _ in lanes]), rank)
        for (k, variables), at in zip(structure, torch.tensor([places for _, places in lanes]).T, strict=True):
            used = [column for column, v in enumerate(variables) if v >= 0]  # node 0 has no shift
            factors, constant = equations[k].factors[at].T[used], equations[k].constant[at]
            system.equations.append((equations[k].norm, [variables[column] for column in used], factors, constant))
        result.append(system)
    return result
