"""Gains that are zero, or nearly so: they pass only where nothing divides by them."""

from collections.abc import Iterable

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
    """Classes of channels that share a coordinate, and the producers and consumers of each."""

    def __init__(self, relations: Relations):
        self.root = united(relations.trace.codes, [link.followed for link in relations.links]).root
        sources, norms = relations.trace.sources.values(), relations.norms.values()
        self.pinned = self._count(link.a[link.b == 0] for link in relations.links if link.scale) > 0
        self.products_read = self._count(relations.inputs.values()) > 0
        self.products_write = self._count(source.codes for source in sources if source.product) > 0
        self.gains_write = self._count(s.codes for s in sources if s.product and s.product.kind == "gain") > 0
        self.sums_write = self._count(source.codes for source in sources if source.adds) > 0
        self.norms_read = self._count(node.inputs for node in norms)
        self.norms_write = self._count(source.codes for source in sources if source.kind == "norm")

    def _count(self, nodes: Iterable[Tensor]) -> Tensor:
        """Count the nodes in each class."""
        at = self.root[torch.cat([torch.zeros(0, dtype=torch.long), *nodes])]
        return at.bincount(minlength=len(self.root))

    def only_products_read(self, node: NormNode) -> Tensor:
        """The channels of a norm that only products read, as they are or times a number."""
        at = self.root[node.outputs]
        others = self.products_write | self.sums_write | self.pinned
        return ~others[at] & (self.norms_write[at] == 1) & (self.norms_read[at] == 0) & (at > 0)

    def only_it_reads(self, node: NormNode) -> Tensor:
        """The channels that layers write for this norm alone, with all gains zero or none."""
        at = self.root[node.inputs]
        others = (self.norms_write > 0) | self.gains_write | self.pinned | self.products_read
        own, gone = self._count([node.inputs]), self._count([node.inputs[node.scale == 0]])
        alike = (gone == 0) | (gone == own)
        return (~others & (self.norms_read == own) & alike)[at] & (at > 0)
