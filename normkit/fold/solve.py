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

from normkit.fold.forest import Forest, components, unite
from normkit.fold.relations import Equation, Link, NormNode, Relations, equation, united
from normkit.fold.shifts import ROUNDING, Shifts

SMALL = 1e-6  # a gain below this part of the largest, or of 1, counts as zero
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
        self.stuck = _mark_small_gains(relations)
        links = [link for link in relations.links if link.scale]
        self.hard = united(relations.trace.codes, links)
        ends = torch.arange(relations.trace.codes)
        given = ends[(self.hard.root == ends) & ~self.hard.free & (ends > 0)]  # s ** 2 = 1
        if len(given):
            self.hard = united(relations.trace.codes, [*links, Link(given, torch.zeros_like(given))])
        self.online = {name: node for name, node in self.nodes.items() if not node.offline}
        unchanged = [equation((node.outputs, 1.0), norm=_unchanged(name)) for name, node in self.online.items()
                     if not node.takes_shift]  # fmt: skip
        self.shifts = Shifts(relations, [*relations.equations, *map(_identity, self.nodes.values()), *unchanged])
        self._agree: dict[frozenset[str], bool] = {}

    # -- consistency --------------------------------------------------------------------------------------------------

    def consistent(self, norms: Iterable[str]) -> bool:
        """True if these norms can be folded together."""
        chosen = frozenset(norms)
        return (not self.stuck.keys() & chosen and self.scales_agree(chosen)
                and self.shifts.consistent(self._conditions(chosen)))  # fmt: skip

    def scales_agree(self, norms: frozenset[str]) -> bool:
        """True if the scales of these norms do not contradict each other."""
        if norms not in self._agree:
            self._agree[norms] = not bool(self._forest(norms)[1].broken.any())
        return self._agree[norms]

    def _conditions(self, norms: Iterable[str]) -> frozenset[str]:
        """The names of the equations of shifts that hold if these norms are folded."""
        norms = frozenset(norms)
        return norms | {_unchanged(name) for name in self.online if name not in norms}

    def _forest(self, norms: Iterable[str]) -> tuple[Tensor, Forest]:
        """The roots that norms connect, and the forest over their positions."""
        norms, power = set(norms), self.hard.exponent
        reads, writes = [torch.zeros(1, dtype=torch.long)], [torch.zeros(1, dtype=torch.long)]  # node 0 and itself
        exponents, gains = [torch.ones(1).double()], [torch.ones(1).double()]
        for name, node in self.nodes.items():
            if name not in norms and (node.offline or node.takes_scale):
                continue
            gain = torch.where(node.scale == 0, 1.0, node.scale) if name in norms else torch.ones_like(node.scale)
            reads.append(self.hard.root[node.inputs])
            writes.append(self.hard.root[node.outputs])
            exponents.append(power[node.inputs] * power[node.outputs])
            gains.append(gain ** power[node.outputs])
        roots, index = torch.cat([*writes, *reads]).unique(return_inverse=True)
        a, b = index.view(2, -1)
        return roots, unite(len(roots), a, b, torch.cat(exponents), torch.cat(gains))

    # -- the result ---------------------------------------------------------------------------------------------------

    def _scales(self, gains: Iterable[str]) -> Tensor:
        """The scale of every node if the gains of these norms are folded."""
        roots, soft = self._forest(gains)
        of_root = torch.ones(len(self.hard.root)).double().index_put((roots,), soft.values())
        return of_root[self.hard.root] ** self.hard.exponent

    def coordinates(self, norms: Iterable[str], additions: Iterable[str] = ()) -> Coordinates:
        """The coordinates that fold these norms, and the gain of `additions`."""
        scale = self._scales({*norms, *additions})
        scale[(scale - 1).abs() < ROUNDING] = 1.0
        written = torch.ones_like(scale)
        for node in (self.nodes[name] for name in norms):
            for dead, at, mask in ((node.dead_reads, node.outputs, scale), (node.dead_writes, node.inputs, written)):
                if bool(dead.any()):
                    mask[torch.isin(self.hard.root, self.hard.root[at[dead]])] = 0.0
        return Coordinates(scale, self.shifts.values(self._conditions(norms)), written)

    # -- the choice ---------------------------------------------------------------------------------------------------

    def choose(self, allowed: Callable[[str], bool]) -> set[str]:
        """A largest set of offline norms that can be folded together, then gains of online ones."""
        names = [name for name, node in self.nodes.items() if node.offline and allowed(name)]
        chosen = set(names)
        if not self.consistent(names):
            chosen = set()
            for part in self._parts([name for name in names if self.consistent([name])]):
                chosen |= set(part) - _fewest_out(part, self.consistent)
        gains = [name for name, node in self.online.items() if not node.trivial and allowed(name)]
        return set(add_each(gains, self.consistent, chosen))

    def additions(self, chosen: set[str]) -> set[str]:
        """The other norms whose gain can be folded, so that an addition is left of them.

        Of norms that compute statistics at inference these are those whose own bias stays, as the architecture is kept.
        """
        keep = self.relations.trace.keep_architecture
        others = [(name, node.scale) for name, node in self.nodes.items()
                  if (node.offline or (keep and node.takes_shift)) and name not in chosen]  # fmt: skip
        useful = [name for name, scale in others if name not in self.stuck and bool(scale.all() & (scale != 1).any())]
        return set(add_each(useful, lambda found: self.scales_agree(frozenset({*chosen, *found}))))

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


def add_each(names: Iterable[str], fits: Callable[[list[str]], bool], start: Iterable[str] = ()) -> list[str]:
    """Add each name in order that fits together with those before it."""
    kept = [*start]
    for name in names:
        if fits([*kept, name]):
            kept.append(name)
    return kept


def _fewest_out(names: list[str], consistent: Callable[[Iterable[str]], bool]) -> set[str]:
    """A smallest set of norms without which the others are consistent, the last if in doubt."""
    trials = 0

    def without(out: frozenset[str], more: int) -> frozenset[str] | None:
        nonlocal trials
        trials += 1
        clash = smallest_clash([name for name in names if name not in out], consistent)
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
    return set(names) - set(add_each(names, consistent))


def smallest_clash(names: list[str], consistent: Callable[[Iterable[str]], bool]) -> list[str]:
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


def _unchanged(name: str) -> str:
    """The name of the equation of an online norm that is not folded."""
    return f"{name}, unchanged"


def _identity(node: NormNode) -> Equation:
    """`t_y - a * t_x = b`; where nothing writes x any more, x is 0: `t_y - t_x = b`."""
    gain = torch.where(node.dead_writes, 1.0, node.scale)
    return equation((node.outputs, 1.0), (node.inputs, -gain), constant=node.shift, norm=node.name)


def _mark_small_gains(relations: Relations) -> dict[str, str]:
    """Mark the channels of every norm whose gain is zero; return the norms that these keep.

    A channel with a small gain passes in two places: where only products read it (they multiply by the gain), and where
    nothing but this norm reads what some layers write (they write it times the gain).
    """
    norms = [node for name, node in relations.norms.items() if name not in relations.kept]
    stuck = {}
    if not any(bool(_small(node).any()) for node in norms):
        return stuck
    root = united(relations.trace.codes, [link.followed for link in relations.links]).root  # same root, same coordinate
    sources = relations.trace.sources.values()

    def count(nodes: Iterable[Tensor]) -> Tensor:
        """Count the nodes in each class, by its root."""
        return root[torch.cat([torch.zeros(0, dtype=torch.long), *nodes])].bincount(minlength=len(root))

    pinned = count(link.a[link.b == 0] for link in relations.links if link.scale)
    gains_write = count(source.codes for source in sources if source.product and source.product.kind == "gain")
    layers_write = count(source.codes for source in sources if source.product or source.adds)
    norms_write = count(source.codes for source in sources if source.kind == "norm")
    norms_read = count(node.inputs for node in relations.norms.values())
    only_products_read = (layers_write + pinned + norms_read == 0) & (norms_write == 1)
    only_norms_read = norms_write + gains_write + pinned + count(relations.inputs.values()) == 0
    only_products_read[0] = only_norms_read[0] = False
    for node in norms:
        small, own, gone = _small(node), count([node.inputs]), count([node.inputs[node.scale == 0]])
        only_it_reads = only_norms_read & (norms_read == own) & ((gone == 0) | (gone == own))  # all gains zero or none
        reads, writes = only_products_read[root[node.outputs]], only_it_reads[root[node.inputs]]
        if number := int((small & ~reads & ~writes).sum()):
            stuck[node.name] = f"its gain is zero, or nearly so, in {number} of {len(small)} channels"
        node.dead_reads = (node.scale == 0) & reads
        node.dead_writes = (node.scale == 0) & ~reads
    return stuck


def _small(node: NormNode) -> Tensor:
    return node.scale.abs() <= SMALL * node.scale.abs().max().clamp(max=1)
