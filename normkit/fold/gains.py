"""Gains that are zero, or nearly so: they pass only where nothing divides by them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from normkit.fold.relations import NormNode, Relations, united

SMALL = 1e-6  # a gain below this part of the largest, or of 1, counts as zero


def mark_small_gains(relations: Relations) -> dict[str, str]:
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
