"""The plan of a fold: coordinates, the outcome of each norm, reasons for those that stay."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from normkit.transforms.fold.conditioning import Conditioning
from normkit.transforms.fold.position import position
from normkit.transforms.fold.relations import NormNode, Relations, listed, listed_once, new_bias
from normkit.transforms.fold.report import Outcome
from normkit.transforms.fold.solve import Coordinates, Solver
from normkit.transforms.fold.trace import Product, Trace, View

ONLINE = "statistics of each token are computed at inference"


@dataclass
class FoldPlan:
    """Coordinates of all nodes, the outcome of every norm, and the biases to be made."""

    relations: Relations
    at: Coordinates
    spread: float = 1.0  # the largest range of a channel of a stream over that of the median channel
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    new_biases: dict[Product, tuple[View, int]] = field(default_factory=dict)

    def affine(self, node: NormNode) -> tuple[Tensor, Tensor]:
        """The gain and bias that a norm has in the new coordinates."""
        s, t = self.at.scale, self.at.shift
        gain = node.scale * s[node.inputs] / s[node.outputs]
        return gain, (node.scale * t[node.inputs] + node.shift - t[node.outputs]) / s[node.outputs]


def make_plan(
    trace: Trace,
    model: nn.Module,
    refused: dict[str, str] | None = None,
    only: Collection[str] | None = None,
    spread: float | None = None,
    balance: bool = False,
) -> FoldPlan:
    """Plan the fold of a traced model.

    Args:
        trace: The trace.
        model: The traced model, in float64.
        refused: Norms that stay as they are, with the reason.
        only: Of the other norms those that may vanish; all by default.
        spread: The limit of the spread of a stream's channels.
        balance: Make the ranges of a stream's channels equal where their scales are free.
    """
    planner = _Planner(trace, model, refused or {})
    return planner.plan(only, Conditioning(planner.solver, spread, balance))


class _Planner:
    def __init__(self, trace: Trace, model: nn.Module, refused: dict[str, str]):
        self.trace, self.model = trace, model
        self.relations = Relations(trace, model, refused)
        self.solver = Solver(self.relations)

    def plan(self, only: Collection[str] | None, conditioning: Conditioning) -> FoldPlan:
        """Choose the norms, solve, and describe the result."""
        chosen = self.solver.choose(lambda name: only is None or name in only, conditioning.within)
        additions = self.solver.additions(chosen, conditioning.fits) if only is None else set()
        at = conditioning.coordinates(chosen, additions)
        plan = FoldPlan(self.relations, at, conditioning.spread(at))
        self.limit = conditioning.limit
        self._new_biases(plan)
        readers, writers = self._changed(plan)
        for name, node in self.relations.norms.items():
            plan.outcomes[name] = self._outcome(plan, node, chosen, additions, readers, writers)
        self._charge(plan)
        return plan

    # -- layers that change -------------------------------------------------------------------------------------------

    def _new_biases(self, plan: FoldPlan) -> None:
        for product, inputs in self.relations.inputs.items():
            moved = bool(plan.at.shift[inputs].any()) or bool(plan.at.shift[self.relations.outputs[product]].any())
            if moved and product.takes_bias and product not in self.trace.biases:
                plan.new_biases[product] = new_bias(self.model, self.trace, product)

    def _changed(self, plan: FoldPlan) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
        """By stream the layers that read it, and that write it, in another coordinate."""
        readers: dict[int, list[str]] = defaultdict(list)
        writers: dict[int, list[str]] = defaultdict(list)
        at = plan.at
        other = (at.scale != 1) | (at.shift != 0) | (at.written != 1)
        for product, inputs in self.relations.inputs.items():
            outputs = self.relations.outputs[product]
            if product.kind == "gain" and torch.equal(at.scale[inputs], at.scale[outputs]):
                continue  # it stays as it is
            for nodes, layers in ((inputs, readers), (outputs, writers)):
                for stream in self.relations.streams_of(nodes[other[nodes]]):
                    layers[stream].append(product.layer)
        for name, node in self.relations.norms.items():
            for stream in self.relations.streams_of(node.outputs[other[node.outputs]]) if node.takes_scale else ():
                writers[stream].append(name)
        return readers, writers

    def _outcome(
        self, plan: FoldPlan, node: NormNode, chosen: set[str], additions: set[str], readers: dict, writers: dict
    ) -> Outcome:
        name = node.name
        outcome = Outcome(name, node.spec, position(self.trace, name), "kept")
        if name in self.relations.kept:
            return replace(outcome, why=self.relations.kept[name])
        own = sum(p.numel() for p in self.model.get_submodule(name).parameters())
        own -= sum(p.numel() for p in node.rest.parameters())
        if not node.offline and node.trivial:
            return replace(outcome, why=f"{ONLINE}; no gain or bias to fold")
        after = listed_once(each for stream in self.relations.streams_of(node.outputs) for each in readers[stream])
        before = listed_once(each for stream in self.relations.streams_of(node.inputs) for each in writers[stream])
        if name in chosen and not node.offline:
            return replace(outcome, action="gain folded", into=after, why=ONLINE, saved=own)
        if name in chosen:
            action = "folded back" if before and not after else "folded"
            why = "" if before or after else "it is the identity" if node.trivial else "its output is not used"
            return replace(outcome, action=action, into=listed_once([*after, *before]), why=why, saved=own)
        why = self._reason(node, chosen)
        if not node.offline:
            moved = bool((plan.at.scale[node.outputs] != 1).any() | (plan.at.shift[node.outputs] != 0).any())
            return replace(outcome, action="gain changed" if moved else "kept", why=why)
        _, shift = plan.affine(node)
        kept = len(shift) * (int(bool((shift != 0).any())) + int(name not in additions))
        if name in additions:
            why = why.split("; nor into")[0] + ": the gain is folded, one addition stays"
            return replace(outcome, action="add", into=listed_once([*after, *before]), why=why, saved=own - kept)
        return replace(outcome, action="multiply-add", why=why, saved=own - kept)

    def _charge(self, plan: FoldPlan) -> None:
        """Count every bias that has to be made against a norm that it is made for."""
        gone = [name for name, each in plan.outcomes.items() if each.into]
        made: set[str] = set()
        for product, (place, length) in plan.new_biases.items():
            if place.parameter in made:
                continue
            made.add(place.parameter)
            name = next(name for name in gone if product.layer in plan.outcomes[name].into or name == gone[-1])
            cost = length + self._second_bias(place)
            plan.outcomes[name] = replace(plan.outcomes[name], saved=plan.outcomes[name].saved - cost)

    def _second_bias(self, place: View) -> int:
        """The length of the second bias that `nn.MultiheadAttention` then has to have."""
        owner = self.model.get_submodule(place.parameter.rpartition(".")[0])
        if isinstance(owner, nn.MultiheadAttention) and owner.out_proj.bias is None:
            return owner.embed_dim
        return 0

    # -- reasons ------------------------------------------------------------------------------------------------------

    def _reason(self, node: NormNode, chosen: set[str]) -> str:
        """The reason for a norm that stays: what fixes its output, and what fixes its input."""
        if node.name in self.solver.stuck:
            return self.solver.stuck[node.name]
        after, before = (
            self.relations.fixed_by(self.relations.streams_of(nodes)) for nodes in (node.outputs, node.inputs)
        )
        if self.limit is not None and self.solver.consistent([*chosen, node.name]):
            return f"folded, the ranges of a stream's channels would spread by more than {self.limit:g}"
        if bool((node.inputs == 0).any()):
            before = "its input is not the output of layers alone"
        if not after or not before:
            clash = [
                name
                for name in self.solver.clash([*(each for each in self.solver.nodes if each in chosen), node.name])
                if name in self.solver.nodes
            ]
            if len(clash) > 1:
                ends = self.relations.fixed_by({
                    stream for name in clash for node in [self.solver.nodes[name]]
                    for nodes in (node.inputs, node.outputs) for stream in self.relations.streams_of(nodes)
                })  # fmt: skip
                return f"of {listed(clash, 4)} all but one can be folded" + (f": {ends}" if ends else "")
        if not after and self.relations.streams_of(node.inputs) & self.relations.streams_of(node.outputs):
            return "its output is added to its own input"
        if after and before and after != before and node.offline:
            return f"{after}; nor into what precedes it: {before}"
        return after or before or "its relations contradict each other"
