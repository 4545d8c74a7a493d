"""What running a model showed: where each number in it comes from, and who reads it."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ZERO, FOREIGN = 0.0, -1.0  # codes of padding, and of anything that is not followed


class View(NamedTuple):
    """Part of a parameter seen as `[groups, in, positions, out]`; size and stride are those of its own storage."""

    parameter: str
    size: tuple[int, int, int, int]
    stride: tuple[int, int, int, int]
    offset: int

    def of(self, values: Tensor) -> Tensor:
        """This part of a contiguous tensor that has the parameter's shape."""
        return torch.as_strided(values, self.size, self.stride, self.offset)

    @property
    def outputs(self) -> int:
        """How many output channels it has."""
        return self.size[0] * self.size[3]


class Place(NamedTuple):
    """A stretch of a parameter: where a bias is."""

    parameter: str
    offset: int
    length: int

    def of(self, values: Tensor) -> Tensor:
        """This stretch of a contiguous tensor that has the parameter's shape."""
        return values.view(-1)[self.offset : self.offset + self.length]


@dataclass(frozen=True)
class Product:
    """A use of a weight: `out[g, n] = sum over k, r of in[g, k, r] * weight[g, k, r, n] + bias[g, n]`."""

    view: View
    owner: str  # the module whose forward ran
    kind: str  # "matmul", "convolution", "embedding", "table"


class Read(NamedTuple):
    """Somebody reads these channels of a source: a Product, a source made of it, or whatever `by` says in words."""

    by: "Product | Source | str"
    codes: Tensor  # sorted, unique


@dataclass(eq=False)
class Source:
    """Something whose channels are followed: the output of a norm or product, a table, a sum of those.

    `terms` of a sum: for each summand the pairs (its code, channel of the sum) and a factor; None for an unknown one.
    """

    kind: str  # "norm", "product", "table", "sum", "input"
    name: str
    base: int
    size: int
    product: Product | None = None
    terms: list[tuple[Tensor, float] | None] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)

    def read(self, by: "Product | Source | str", codes: Tensor) -> None:
        """Note a reader, once."""
        same = any(r.by == by and torch.equal(r.codes, codes) for r in self.reads)
        if not same:
            self.reads.append(Read(by, codes))


class Trace:
    """What one or several forwards of a model showed; `norms` are names of norms with their axis of channels.

    `resizable`: the model takes inputs of other sizes, so that padding by nothing may be padding by something.
    """

    def __init__(self, model: nn.Module, norms: dict[str, int], resizable: bool = False):
        self.norms = norms
        self.resizable = resizable
        self.sources: dict[Any, Source] = {}
        self.inputs: dict[str, Tensor | None] = {}  # norm: pairs (code, channel); None where its origin is unknown
        self.codes_in: dict[Product, Tensor] = {}  # [groups, in]: which channel each input of a product is
        self.padded: set[Product] = set()  # products that also see zeros in place of a followed channel
        self.weight_readers: dict[str, set[str]] = defaultdict(set)  # parameter: operations that are no product
        self.biases: dict[Product, Place] = {}  # where the bias of a product is, if it has one
        self.entangled: dict[str, str] = {}  # parameters that are views of one another's memory
        self.sizes: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.owners: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for module_name, module in model.named_modules(remove_duplicate=False):
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    name = self.names.setdefault(id(tensor), f"{module_name}.{key}" if module_name else key)
                    self.owners[name].append((module_name, key))
                    self.sizes[name] = tensor.numel()
        self.codes = 1  # how many are given away

    def source(self, key: Any, kind: str, name: str, size: int, product: Product | None = None) -> Source:
        """The source of that key, made when it is first asked for; codes stay the same over several forwards."""
        if key not in self.sources:
            self.sources[key] = Source(kind, name, self.codes, size, product)
            self.codes += size
        return self.sources[key]

    def by_code(self, codes: Tensor) -> Iterator[tuple[Source, Tensor]]:
        """The sources that these codes belong to, each with its own codes, sorted."""
        codes = codes.unique()
        codes = codes[codes > ZERO]
        for source in list(self.sources.values()) if codes.numel() else []:
            own = codes[(codes >= source.base) & (codes < source.base + source.size)]
            if own.numel():
                yield source, own


def channel_pairs(shadow: Tensor, dim: int) -> Tensor:
    """All pairs (code, index along `dim`) in a shadow, `[n, 2]`."""
    rows = shadow.movedim(dim, -1).flatten(0, -2) if shadow.dim() > 1 else shadow[None]
    if bool((rows == rows[:1]).all()):
        rows = rows[:1]
    channel = torch.arange(rows.shape[1], dtype=torch.float64).expand(rows.shape)
    return torch.stack([rows.flatten(), channel.flatten()], 1).unique(dim=0)
