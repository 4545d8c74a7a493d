"""Gains that are zero, or nearly so: they pass only where nothing divides by them."""

import torch
from torch import Tensor

from normkit.transforms.fold.relations import NormNode, Relations, united

SMALL = 1e-6  # a gain below this part of the largest counts as zero


def mark_small_gains(relations: Relations) -> dict[str, str]:
    """Mark the channels of every norm whose gain is zero; return the norms that these keep.

    A channel with a small gain passes in two places: where only products read it (they multiply by the gain), and where
    nothing but this norm reads what some layers write (they write it times the gain).
    """
    norms = [node for name, node in relations.norms.items() if name not in relations.kept]
    stuck = {}
    if not any(bool(_small(node).any()) for node in norms):
        return stuck
    channels = _Channels(relations)
    for node in norms:
        small = _small(node)
        reads, writes = channels.only_products_read(node), channels.only_it_reads(node)
        if count := int((small & ~reads & ~writes).sum()):
            stuck[node.name] = f"its gain is zero, or nearly so, in {count} of {len(small)} channels"
        node.dead_reads = (node.scale == 0) & reads
        node.dead_writes = (node.scale == 0) & ~reads
    return stuck


def _small(node: NormNode) -> Tensor:
    return node.scale.abs() <= SMALL * node.scale.abs().max()


class _Channels:
    """Channels in classes that share a coordinate, and for each class its writers and readers."""

    def __init__(self, relations: Relations):
        self.relations = relations
        size = relations.trace.codes
        self.root = united(size, [link.followed for link in relations.links]).root
        self.pinned = self._marked([link.a[link.b == 0] for link in relations.links if link.scale])
        self.by_product = self._marked(list(relations.inputs.values()))
        self.norm_reads = torch.zeros(size, dtype=torch.long).index_add_(
            0, self.root[self._all_inputs()], torch.ones(len(self._all_inputs()), dtype=torch.long)
        )
        kinds = {"writer": [], "norm": [], "sum": [], "other": []}
        for source in relations.trace.sources.values():
            multiple = source.kind == "sum" and not source.adds
            kind = (
                "norm" if source.kind == "norm" else "writer" if source.product else "sum" if source.adds else "other"
            )
            if not multiple:
                kinds[kind].append(source.codes)
        self.kinds = {kind: self._marked(codes) for kind, codes in kinds.items()}
        self.norm_writes = torch.zeros(size, dtype=torch.long)
        for codes in kinds["norm"]:
            self.norm_writes.index_add_(0, self.root[codes], torch.ones(len(codes), dtype=torch.long))

    def _all_inputs(self) -> Tensor:
        return torch.cat([node.inputs for node in self.relations.norms.values()])

    def _marked(self, nodes: list[Tensor]) -> Tensor:
        mask = torch.zeros(self.relations.trace.codes, dtype=torch.bool)
        for each in nodes:
            mask[self.root[each]] = True
        return mask

    def only_products_read(self, node: NormNode) -> Tensor:
        """The channels of a norm that only products read, as they are or times a number."""
        at = self.root[node.outputs]
        others = self.kinds["writer"] | self.kinds["sum"] | self.kinds["other"] | self.pinned
        return ~others[at] & (self.norm_writes[at] == 1) & (self.norm_reads[at] == 0) & (at > 0)

    def only_it_reads(self, node: NormNode) -> Tensor:
        """The channels that layers write for this norm alone, with all gains zero or none."""
        at = self.root[node.inputs]
        others = self.kinds["norm"] | self.kinds["other"] | self.pinned | self.by_product
        zero = torch.zeros(len(self.root), dtype=torch.long)
        own = zero.index_add(0, at, torch.ones_like(at))
        gone = zero.index_add(0, at, (node.scale == 0).long())
        alike = (gone[at] == 0) | (gone[at] == own[at])
        return ~others[at] & (self.norm_reads[at] == own[at]) & alike & (at > 0)
