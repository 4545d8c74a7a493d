"""The plan of a fold: coordinates, the outcome of each norm, reasons for those that stay."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor, nn

from normkit._util import listed, unique
from normkit.fold.float64 import on_cpu
from normkit.fold.relations import NormNode, Relations, new_bias
from normkit.fold.report import Outcome
from normkit.fold.solve import Solver, smallest_clash
from normkit.fold.trace import Product, Trace, View

ONLINE = "is computed for each token"


class FoldPlan:
    """Coordinates of all nodes, the outcome of every norm, and the biases to be made.

    `model` is the traced copy. Norms with a reason in `reasons` stay as they are; of the others those in `only` may
    vanish, all by default. With `multiply_adds` no offline norm does.
    """

    @on_cpu()
    def __init__(
        self, trace: Trace, model: nn.Module, reasons: dict[str, str] | None = None,
        only: Collection[str] | None = None, multiply_adds: bool = False,
    ):  # fmt: skip
        self.trace, self.model, self.multiply_adds = trace, model, multiply_adds
        self.relations = Relations(trace, model, reasons or {})
        self.solver = Solver(self.relations)
        stay = {name for name, node in self.relations.norms.items() if node.offline and multiply_adds}
        self.chosen = self.solver.choose(lambda name: (only is None or name in only) and name not in stay)
        self.additions = set() if multiply_adds or only is not None else self.solver.additions(self.chosen)
        self.at = self.solver.coordinates(self.chosen, self.additions)
        self.new_biases: dict[Product, tuple[View, int]] = {}
        for product, inputs in self.relations.inputs.items():
            moved = bool(self.at.shift[inputs].any()) or bool(self.at.shift[self.relations.outputs[product]].any())
            missing = moved and product.takes_bias and product not in trace.biases
            if missing and (made := new_bias(model, trace, product)):
                self.new_biases[product] = made
        self._consumers: dict[int, list[str]] = defaultdict(list)  # by stream the layers that read other coordinates
        self._producers: dict[int, list[str]] = defaultdict(list)
        self._note_layers()
        self.outcomes = {name: self._outcome(node) for name, node in self.relations.norms.items()}

    def affine(self, node: NormNode) -> tuple[Tensor, Tensor]:
        """The gain and bias that a norm has in the new coordinates."""
        s, t = self.at.scale, self.at.shift
        gain = node.scale * s[node.inputs] / s[node.outputs]
        if node.name in self.chosen:
            return torch.ones_like(gain), torch.zeros_like(gain)
        return gain, (node.scale * t[node.inputs] + node.shift - t[node.outputs]) / s[node.outputs]

    def _note_layers(self) -> None:
        """Note the layers that read or write a stream in coordinates other than the original ones."""
        at, streams_of = self.at, self.relations.streams_of
        other = (at.scale != 1) | (at.shift != 0) | (at.written != 1)
        for product, inputs in self.relations.inputs.items():
            outputs = self.relations.outputs[product]
            if product.kind == "gain" and torch.equal(at.scale[inputs], at.scale[outputs]):
                continue  # it stays as it is
            for nodes, layers in ((inputs, self._consumers), (outputs, self._producers)):
                for stream in streams_of(nodes[other[nodes]]):
                    layers[stream].append(product.layer)
        for name, node in self.relations.norms.items():
            for stream in streams_of(node.outputs[other[node.outputs]]) if node.takes_scale else ():
                self._producers[stream].append(name)

    def _outcome(self, node: NormNode) -> Outcome:
        name, streams_of = node.name, self.relations.streams_of
        outcome = Outcome(name, node.spec, "kept")
        if name in self.relations.kept:
            return replace(outcome, why=self.relations.kept[name])
        if not node.offline and node.trivial:
            return replace(outcome, why=f"{ONLINE}; its gain and bias, if any, are 1 and 0")
        after = unique(each for stream in streams_of(node.outputs) for each in self._consumers[stream])
        before = unique(each for stream in streams_of(node.inputs) for each in self._producers[stream])
        into = unique([*after, *before])
        if name in self.chosen and not node.offline:
            return replace(outcome, action="gain folded", into=after, why=ONLINE)
        if name in self.additions and not node.offline:
            why = f"{ONLINE}; its bias stays: {self._reason(node, True).split('; nor into')[0]}"
            return replace(outcome, action="gain folded", into=after, why=why)
        if name in self.chosen:
            action = "folded back" if before and not after else "folded"
            why = "" if into else "it is the identity" if node.trivial else "its output is not used"
            return replace(outcome, action=action, into=into, why=why)
        why = self._reason(node, node.offline)  # of an online norm the gain could go alone
        if not node.offline:
            moved = bool((self.at.scale[node.outputs] != 1).any() | (self.at.shift[node.outputs] != 0).any())
            return replace(outcome, action="gain changed" if moved else "kept", why=f"{ONLINE}; its gain stays: {why}")
        if name in self.additions:
            why = why.split("; nor into")[0] + ": the gain is folded, one addition stays"
            return replace(outcome, action="add", into=into, why=why)
        return replace(outcome, action="multiply-add", why=why)

    def _reason(self, node: NormNode, shifts: bool) -> str:
        """What fixes output and input of a norm that stays; their scale alone if not `shifts`."""
        if node.name in self.solver.stuck:
            return self.solver.stuck[node.name]
        if self.multiply_adds and node.offline:
            return "multiply_adds=True leaves it"
        fixed_by, streams_of = self.relations.fixed_by, self.relations.streams_of
        moves = node.offline or bool((node.shift != 0).any())
        after, before = (
            ("" if shifts else fixed_by(streams, False)) or fixed_by(streams, moves)
            for streams in (streams_of(node.outputs), streams_of(node.inputs))
        )
        if bool((node.inputs == 0).any()):
            before = "its input is not the output of layers alone"
        if not after or not before:
            names = [name for name in self.solver.nodes if name in self.chosen]
            clash = smallest_clash([*names, node.name], self.solver.consistent)
            if len(clash) > 1:
                nodes = [self.solver.nodes[name] for name in clash]
                ends = fixed_by(streams_of(torch.cat([end for each in nodes for end in (each.inputs, each.outputs)])))
                return f"of {listed(clash, 4)} all but one can be folded" + (f": {ends}" if ends else "")
        if not after and streams_of(node.inputs) & streams_of(node.outputs):
            return "its output is added to its own input"
        if after and before and after != before and node.offline:
            return f"{after}; nor into what precedes it: {before}"
        return after or before or "its relations contradict each other"
