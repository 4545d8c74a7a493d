"""Find coordinates in which as many norms as possible are the identity.

A frozen norm `y = a * x + b` vanishes where `s_y = a * s_x` and `t_y = a * t_x + b`. Scales are products and inverses
of one another: a union-find with a ratio for every edge. Shifts are linear. Norms whose relations contradict the others
stay: as few as possible, and the same ones in every run.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.transforms.fold.forest import Forest, components, unite
from normkit.transforms.fold.gains import mark_small_gains
from normkit.transforms.fold.relations import Link, NormNode, Relations, Row, united
from normkit.transforms.fold.shifts import ROUNDING, Shifts

MOST_TRIALS = 300  # sets of norms that are tried for each connected part of a model, before it takes them one by one


@dataclass(eq=False)
class Coordinates:
    """The `scale` and `shift` of every node.

    The original computes `x = scale * v + shift` where the folded model computes `v`. `written` is 0 for channels
    that only a norm with gain zero reads: nothing writes them any more.
    """

    scale: Tensor
    shift: Tensor
    written: Tensor


class Solver:
    """Decides which norms can be folded together, and finds the coordinates that fold them.

    `stuck` are norms that no set can contain, because a gain is zero. A norm that computes statistics at inference has
    the coordinate of its gain and bias if it is in the set, else any that its own parameters can take.
    """

    def __init__(self, relations: Relations):
        self.relations = relations
        self.nodes = {name: node for name, node in relations.norms.items() if name not in relations.kept}
        self.stuck = mark_small_gains(relations)
        links = [link for link in relations.links if link.scale]
        self.hard = united(relations.trace.codes, links)
        ends = torch.arange(relations.trace.codes)
        given = ends[(self.hard.root == ends) & ~self.hard.free & (ends > 0)]  # s ** 2 = 1
        if len(given):
            self.hard = united(relations.trace.codes, [*links, Link(given, torch.zeros_like(given))])
        self.units = {f"{name}, unchanged": node for name, node in self.nodes.items() if not node.offline}
        ones = []
        for name, node in self.units.items():
            if node.takes_shift:
                continue
            one, zero = torch.ones(len(node.outputs), 1).double(), torch.zeros(len(node.outputs)).double()
            ones.append(Row(node.outputs[:, None], one, zero, name))
        self.shifts = Shifts(relations, [*relations.rows, *map(_row, self.nodes.values()), *ones])
        self._agree: dict[frozenset[str], bool] = {}

    # -- consistency --------------------------------------------------------------------------------------------------

    def consistent(self, norms: Iterable[str]) -> bool:
        """True if these norms can be folded together."""
        chosen = self._all(norms)
        return not self.stuck.keys() & chosen and self.scales_agree(chosen) and self.shifts.consistent(chosen)

    def scales_agree(self, norms: frozenset[str]) -> bool:
        """True if the scales of these norms do not contradict each other."""
        if norms not in self._agree:
            self._agree[norms] = not bool(self._forest(norms)[1].broken.any())
        return self._agree[norms]

    def _all(self, norms: Iterable[str]) -> frozenset[str]:
        norms = set(norms)
        return frozenset(norms | {unit for unit, node in self.units.items() if node.name not in norms})

    def _forest(self, norms: Iterable[str]) -> tuple[Tensor, Forest]:
        """The roots that norms connect, and the forest over their positions."""
        sides, power = [torch.zeros(1, dtype=torch.long)], self.hard.exponent
        exponents, ratios = [], []
        for name in sorted(norms):
            if name in self.units and self.units[name].takes_scale:
                continue
            node = self.nodes.get(name)
            x, y = (node or self.units[name]).inputs, (node or self.units[name]).outputs
            gain = torch.where(node.scale == 0, 1.0, node.scale) if node else torch.ones(len(y), dtype=torch.float64)
            sides += [self.hard.root[y], self.hard.root[x]]
            exponents.append(power[x] * power[y])
            ratios.append(gain ** power[y])
        roots, index = torch.cat(sides).unique(return_inverse=True)
        if not ratios:
            return roots, unite(1, *(torch.zeros(0, dtype=torch.long),) * 2, *(torch.zeros(0).double(),) * 2)
        index = index[1:].split([len(side) for side in sides[1:]])
        a, b = torch.cat(index[0::2]), torch.cat(index[1::2])
        return roots, unite(len(roots), a, b, torch.cat(exponents), torch.cat(ratios))

    # -- the result ---------------------------------------------------------------------------------------------------

    def coordinates(
        self, norms: Iterable[str], additions: Iterable[str] = (), start: Tensor | None = None
    ) -> Coordinates:
        """The coordinates that fold these norms, and the gain of `additions`.

        `start` are the scales of free classes, by their first node.
        """
        norms = set(norms)
        chosen = self._all(norms)
        roots, forest = self._forest(chosen | set(additions))
        value = torch.ones(len(self.hard.root), dtype=torch.float64) if start is None else start.clone()
        value[0] = 1.0
        value[roots] = forest.values(value[roots])
        scale = value[self.hard.root] ** self.hard.exponent
        scale[(scale - 1).abs() < ROUNDING] = 1.0
        written = torch.ones_like(scale)
        for node in (self.nodes[name] for name in norms):
            for dead, at, mask in ((node.dead_reads, node.outputs, scale), (node.dead_writes, node.inputs, written)):
                if dead is not None and bool(dead.any()):
                    mask[torch.isin(self.hard.root, self.hard.root[at[dead]])] = 0.0
        return Coordinates(scale, self.shifts.values(chosen), written)

    def classes(self, norms: Iterable[str], additions: Iterable[str] = ()) -> tuple[Tensor, Tensor, Tensor]:
        """For each node the root of its class, its exponent, and a mask of free classes."""
        roots, forest = self._forest(self._all(norms) | set(additions))
        root, exponent = torch.arange(len(self.hard.root)), torch.ones(len(self.hard.root)).double()
        free = root > 0
        root[roots], exponent[roots] = roots[forest.root], forest.exponent
        free[roots] = forest.free[forest.root]
        hard = self.hard.root
        return root[hard], self.hard.exponent * exponent[hard], free[hard]

    # -- the choice ---------------------------------------------------------------------------------------------------

    def choose(
        self, allowed: Callable[[str], bool] = lambda name: True, within: Callable[[list[str]], list[str]] = list
    ) -> set[str]:
        """A largest set of offline norms that can be folded together, then gains of online ones.

        `within` selects from the offline ones.
        """
        names = [name for name, node in self.nodes.items() if node.offline and allowed(name)]
        chosen = set(names)
        if not self.consistent(names):
            chosen = set()
            for part in self._parts([name for name in names if self.consistent([name])]):
                chosen |= set(part) - _fewest_out(part, self.consistent)
        chosen = set(within([name for name in names if name in chosen]))
        for name, node in self.nodes.items():
            if not node.offline and not node.trivial and allowed(name) and self.consistent({*chosen, name}):
                chosen.add(name)
        return chosen

    def additions(self, chosen: set[str], fits: Callable[[set[str], set[str]], bool]) -> set[str]:
        """The other offline norms whose gain can be folded, so that an addition is left of them.

        `fits(chosen, additions)` limits what they may do.
        """
        found: set[str] = set()
        for name, node in self.nodes.items():
            whole = name not in self.stuck and not bool((node.scale == 0).any())
            useful = node.offline and name not in chosen and whole and bool((node.scale != 1).any())
            if useful and self.scales_agree(self._all({*chosen, *found, name})) and fits(chosen, {*found, name}):
                found.add(name)
        return found

    def clash(self, norms: list[str]) -> list[str]:
        """A smallest part of these norms that cannot be folded together."""
        return _clash(norms, self.consistent)

    def _parts(self, names: list[str]) -> list[list[str]]:
        """The norms in groups that share no channel's scale and no system of shifts."""
        keys: dict[tuple[str, int], int] = {}
        pairs = []
        for k, name in enumerate(names):
            ends = torch.cat([self.nodes[name].inputs, self.nodes[name].outputs])
            own = [("scale", root) for root in self.hard.root[ends].unique().tolist() if root]
            own += [("shift", i) for i, system in enumerate(self.shifts.systems) if name in system.norms]
            pairs += [(k, keys.setdefault(key, len(names) + len(keys))) for key in own]
        parts: dict[int, list[str]] = defaultdict(list)
        for name, first in zip(names, components(len(names) + len(keys), pairs).tolist(), strict=False):
            parts[first].append(name)
        return list(parts.values())


def _fewest_out(names: list[str], consistent: Callable[[Iterable[str]], bool]) -> set[str]:
    """A smallest set of norms without which the others are consistent, the last if in doubt."""
    trials = 0

    def without(out: frozenset[str], more: int) -> frozenset[str] | None:
        nonlocal trials
        trials += 1
        clash = _clash([name for name in names if name not in out], consistent)
        if not clash:
            return out
        if more == 0 or trials > MOST_TRIALS:
            return None
        return next((found for name in clash if (found := without(out | {name}, more - 1)) is not None), None)

    for most in range(len(names)):
        if (found := without(frozenset(), most)) is not None:
            return set(found)
        if trials > MOST_TRIALS:
            break
    kept: list[str] = []
    for name in names:
        if consistent([*kept, name]):
            kept.append(name)
    return set(names) - set(kept)


def _clash(names: list[str], consistent: Callable[[Iterable[str]], bool]) -> list[str]:
    """A smallest inconsistent part of the names, the last first; empty if consistent."""
    found: list[str] = []
    if consistent(names):
        return found
    while not found or consistent(found):
        low, high = 1, len(names)  # the shortest beginning that contradicts what was found
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if consistent([*found, *names[:middle]]) else (low, middle)
        found.append(names[low - 1])
        names = names[: low - 1]
    return found


def _row(node: NormNode) -> Row:
    """The row `t_y - a * t_x = b`; where nothing writes x any more, x is 0: `t_y - t_x = b`."""
    gain = node.scale if node.dead_writes is None else torch.where(node.dead_writes, 1.0, node.scale)
    nodes = torch.stack([node.outputs, node.inputs], 1)
    return Row(nodes, torch.stack([torch.ones_like(gain), -gain], 1), node.shift, node.name)
