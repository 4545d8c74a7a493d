"""Record of a traced model: the origin of every channel, and everything that reads it."""

import copy
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.transforms.third_party import Found

ZERO, FOREIGN = 0.0, -1.0  # codes of padding, and of anything that is not followed


class View(NamedTuple):
    """Part of a parameter as `[groups, in, positions, out]`, by size and stride."""

    parameter: str
    size: tuple[int, int, int, int]
    stride: tuple[int, int, int, int]
    offset: int

    def of(self, values: Tensor) -> Tensor:
        """This part of a contiguous tensor that has the parameter's shape."""
        return torch.as_strided(values, self.size, self.stride, self.offset)

    @property
    def outputs(self) -> int:
        """The number of output channels."""
        return self.size[0] * self.size[3]


class Place(NamedTuple):
    """A stretch of a parameter that holds a bias."""

    parameter: str
    offset: int
    length: int

    def of(self, values: Tensor) -> Tensor:
        """This stretch of a contiguous tensor that has the parameter's shape."""
        return values.view(-1)[self.offset : self.offset + self.length]


@dataclass(frozen=True)
class Product:
    """A use of a weight, `out[g, n] = sum of in[g, k, r] * weight[g, k, r, n] + bias[g, n]`."""

    view: View
    owner: str  # the module whose forward ran
    kind: str  # "matmul", "convolution", "embedding", "table"

    @property
    def adds(self) -> bool:
        """The weight itself takes a shift: it is a table of vectors, not a matrix."""
        return self.kind in ("embedding", "table")


@dataclass(eq=False)
class Source:
    """Channels that are followed: the output of a norm or product, a table, a sum, an input.

    `terms` of a sum: for each summand the pairs (its code, channel of the sum) and a factor; None where the summand is
    not followed. `reads`: the sorted codes that each reader reads. A reader is a Product, a Source made of this one, or
    an operation in words. `gains` of a product with a parameter per channel: the codes of that parameter.
    """

    kind: str  # "norm", "product", "table", "sum", "scaled", "input"
    name: str
    base: int
    size: int
    product: Product | None = None
    terms: list[tuple[Tensor, float] | None] = field(default_factory=list)
    reads: dict["Product | Source | str", Tensor] = field(default_factory=dict)
    gains: Tensor | None = None
    range: tuple[Tensor, Tensor] | None = None

    def measure(self, tensor: Tensor, dim: int) -> None:
        """Widen the range by the values of a tensor whose axis `dim` are the channels."""
        rows = tensor.detach().movedim(dim, -1).flatten(0, -2)
        low, high = (t.double().cpu() for t in rows.aminmax(dim=0))
        if self.range is not None:
            low, high = torch.minimum(low, self.range[0]), torch.maximum(high, self.range[1])
        self.range = low, high

    def read(self, by: "Product | Source | str", codes: Tensor) -> None:
        """Note a reader of some of the codes."""
        known = self.reads.get(by)
        if known is None:
            self.reads[by] = codes
        elif not torch.equal(known, codes):
            self.reads[by] = torch.cat([known, codes]).unique()

    @property
    def codes(self) -> Tensor:
        """The codes of its channels."""
        return self.base + torch.arange(self.size)

    @property
    def adds(self) -> bool:
        """It is a sum of several terms."""
        return len(self.terms) > 1


class Trace:
    """Record of one or several forwards.

    `norms` is what `find` found. `resizable`: the model takes inputs of other sizes, so that padding of width zero may
    become wider.
    """

    def __init__(self, model: nn.Module, norms: dict[str, Found]):
        self.norms = norms
        self.resizable = False
        self.sources: dict[Any, Source] = {}
        self.inputs: dict[str, Tensor] = {}  # norm: pairs (code, channel)
        self.slots: dict[Product, Tensor] = {}  # pairs (code, input of the product)
        self.weight_readers: dict[str, set[str]] = defaultdict(set)  # parameter: operations that are no product
        self.biases: dict[Product, Place] = {}
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
        self.advice: Callable[[list[str]], str] = lambda weights: "give an example that does"  # for idle weights
        self.codes = 1  # the next free code
        self.measuring = False  # note the ranges of sums
        self._bases: list[int] = []
        self._ordered: list[Source] = []

    def source(self, key: Any, kind: str, name: str, size: int, product: Product | None = None) -> Source:
        """The source with that key, created on first use; its codes stay the same."""
        if key not in self.sources:
            self.sources[key] = Source(kind, name, self.codes, size, product)
            self._bases.append(self.codes)
            self._ordered.append(self.sources[key])
            self.codes += size
        return self.sources[key]

    def by_code(self, codes: Tensor) -> Iterator[tuple[Source, Tensor]]:
        """The sources that these codes belong to, each with its own codes, sorted."""
        codes = codes.unique()
        codes = codes[codes > ZERO]
        while codes.numel():
            source = self._ordered[bisect_right(self._bases, float(codes[0])) - 1]
            count = int(torch.searchsorted(codes, source.base + source.size))
            yield source, codes[:count]
            codes = codes[count:]

    def snapshot(self) -> Callable[[], None]:
        """Remember the state; the function that is returned goes back to it."""
        kept = {key: copy.copy(getattr(self, key)) for key in vars(self)}
        fields = [(source, list(source.terms), dict(source.reads)) for source in self._ordered]
        readers = {name: set(by) for name, by in self.weight_readers.items()}

        def restore() -> None:
            for key, value in kept.items():
                setattr(self, key, value)
            for source, terms, reads in fields:
                source.terms, source.reads = terms, reads
            self.weight_readers = defaultdict(set, readers)

        return restore

    def join(self, known: Tensor | None, pairs: Tensor) -> Tensor:
        """The pairs of several calls together."""
        if known is None or torch.equal(known, pairs):
            return pairs
        return torch.cat([known, pairs]).unique(dim=0)

    def streams(self) -> dict[int, int]:
        """The stream of each source, by first codes: sources that are added are one stream."""
        stream = {source.base: source.base for source in self.sources.values()}

        def find(base: int) -> int:
            while stream[base] != base:
                base = stream[base]
            return base

        for source in self.sources.values():
            for term in source.terms if source.gains is None else ():
                for part, _ in self.by_code(term[0][:, 0]) if term else ():
                    first, second = sorted((find(source.base), find(part.base)))
                    stream[second] = first
        return {base: find(base) for base in stream}


def varying(shadow: Tensor) -> Tensor:
    """A shadow with each axis along which it was only expanded cut to length one."""
    for axis, (length, stride) in enumerate(zip(shadow.shape, shadow.stride(), strict=True)):
        if stride == 0 and length > 1:
            shadow = shadow.narrow(axis, 0, 1)
    return shadow


def channel_pairs(shadow: Tensor, dim: int) -> Tensor:
    """All pairs (code, index along `dim`) in a shadow, `[n, 2]`."""
    rows = distinct(channel_rows(shadow, dim))
    length = rows.shape[1]
    if len(rows) == 1:
        return torch.stack([rows[0], torch.arange(length, dtype=torch.float64)], 1)
    keys = (rows * length + torch.arange(length, dtype=torch.float64)).unique()  # whole numbers, exact in float64
    return torch.stack([torch.div(keys, length, rounding_mode="floor"), keys.remainder(length)], 1)


def channel_rows(shadow: Tensor, dim: int) -> Tensor:
    """A shadow as `[rows, channels]`, rows that are only expanded once."""
    rows = varying(shadow).movedim(dim, -1).flatten(0, -2) if shadow.dim() > 1 else shadow[None]
    return rows.expand(len(rows), shadow.shape[dim])


def distinct(rows: Tensor) -> Tensor:
    """The rows without repetitions of the first few; there are rarely more."""
    found = []
    while len(found) < 4 and len(rows) > 1:
        found.append(rows[:1])
        rows = rows[(rows != rows[:1]).any(1)]
    return torch.cat([*found, rows])
