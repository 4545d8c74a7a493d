"""Record of a traced model: the origin of every channel, and everything that reads it."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normkit.fold.forest import components
from normkit.models.third_party import Found

ZERO, FOREIGN = 0.0, -1.0  # codes of padding, and of anything that is not followed


class View(NamedTuple):
    """Part of a parameter as `[groups, in, positions, out]`, by size and stride."""

    parameter: str
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def at(parameter: str, part: Tensor) -> "View":
        """The view of a parameter that a tensor `[groups, in, positions, out]` is."""
        stride = [step if length > 1 else 0 for length, step in zip(part.shape, part.stride(), strict=True)]
        return View(parameter, tuple(part.shape), tuple(stride), int(part.storage_offset()))

    @staticmethod
    def row(parameter: str, length: int, offset: int = 0) -> "View":
        """Numbers in a row, one for each output channel: a bias or a table."""
        return View(parameter, (1, 1, 1, length), (0, 0, 0, 1), offset)

    def of(self, values: Tensor) -> Tensor:
        """This part of a contiguous tensor that has the parameter's shape."""
        return torch.as_strided(values, self.size, self.stride, self.offset)

    @property
    def transposed(self) -> "View":
        """The same elements, with inputs and outputs exchanged."""
        size, stride = ((groups, outputs, rest, inputs) for groups, inputs, rest, outputs in (self.size, self.stride))
        return self._replace(size=size, stride=stride)

    @property
    def end(self) -> int:
        """The place after its last element."""
        return self.offset + sum((length - 1) * step for length, step in zip(self.size, self.stride, strict=True)) + 1

    @property
    def inputs(self) -> int:
        """The number of input channels."""
        return self.size[0] * self.size[1]

    @property
    def outputs(self) -> int:
        """The number of output channels."""
        return self.size[0] * self.size[3]


@dataclass(frozen=True)
class Product:
    """A use of a weight, `out[g, n] = sum of in[g, k, r] * weight[g, k, r, n] + bias[g, n]`.

    A "gain", a parameter that multiplies each channel (LayerScale), has a group for each.
    """

    view: View
    owner: str  # the module whose forward ran
    kind: str  # "matmul", "convolution", "gain", "embedding", "table"

    @property
    def layer(self) -> str:
        """The name of its layer for reports."""
        return self.view.parameter.removesuffix(".weight")

    @property
    def takes_bias(self) -> bool:
        """Its layer may have a bias."""
        return self.kind in ("matmul", "convolution")

    @property
    def takes_shift(self) -> bool:
        """The weight itself takes a shift: it is a table of vectors, not a matrix."""
        return self.kind in ("embedding", "table")


@dataclass(frozen=True)
class Rowless:
    """A reader without rows in the example; another call may have some at the same `place`."""

    operation: str
    place: tuple

    def __str__(self) -> str:
        return f"{self.operation}, which had no rows in the example"


@dataclass(eq=False)
class Source:
    """Channels that are followed: the output of a norm or product, a table, a sum, an input.

    `terms` of a sum: for each summand the pairs (its code, channel of the sum) and a factor. `reads`: the sorted codes
    that each reader reads. A reader is a Product, a sum of this source, a Rowless, or an operation in words.
    """

    kind: str  # "norm", "product", "table", "sum", "input"
    name: str
    base: int
    size: int
    product: Product | None = None
    terms: list[tuple[Tensor, float]] = field(default_factory=list)
    reads: dict["Reader", Tensor] = field(default_factory=dict)

    def note_reader(self, by: "Reader", codes: Tensor) -> None:
        """Note a reader of some of the codes."""
        self.reads[by] = joined(self.reads.get(by), codes)

    @property
    def codes(self) -> Tensor:
        """The codes of its channels."""
        return self.base + torch.arange(self.size, device="cpu")

    @property
    def adds(self) -> bool:
        """It is a sum of several terms."""
        return len(self.terms) > 1


Reader = Product | Source | Rowless | str


class Trace:
    """Record of one or several forwards.

    `norms` is what `find` found. `resizable`: the model takes inputs of other sizes, so that padding of width zero may
    become wider. `keep_weights`: it reads the types of its norms' weights (Mamba); folded norms keep empty ones.
    `keep_architecture`: no parameter comes or goes, and buffers that are not saved stay as they are.
    """

    def __init__(self, model: nn.Module, norms: dict[str, Found], keep_architecture: bool = False):
        self.norms = norms
        self.keep_architecture = keep_architecture
        self.other_inputs: tuple[str, ...] = ()  # modules that read inputs which no call had, and nothing else
        self.resizable = False
        self.keep_weights = False
        self.sources: dict[Any, Source] = {}
        self.inputs: dict[str, Tensor] = {}  # norm: pairs (code, channel)
        self.masked: set[str] = set()  # norms that are called with a mask, or by keyword
        self.deciding: set[str] = set()  # modules whose forward turns a tensor into a number, as a branch does
        self.slots: dict[Product, Tensor] = {}  # pairs (code, input of the product)
        self.weight_consumers: dict[str, set[str]] = defaultdict(set)  # parameter: operations that are no product
        self.rowless: dict[str, set[Rowless]] = defaultdict(set)  # parameter: operations that had no rows
        self.with_rows: set[tuple] = set()  # places of operations that had rows in some call
        self.biases: dict[Product, View] = {}
        self.entangled: dict[str, str] = {}  # parameters that are views of one another's memory
        self.sizes: dict[str, int] = {}  # numbers of elements
        self.names: dict[int, str] = {}
        self.owners: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for module_name, module in model.named_modules(remove_duplicate=False):
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
                if tensor is not None:
                    name = self.names.setdefault(id(tensor), f"{module_name}.{key}" if module_name else key)
                    self.owners[name].append((module_name, key))
                    self.sizes[name] = tensor.numel()
                    if keep_architecture and key in module._non_persistent_buffers_set:
                        self.weight_consumers[name].add("its module, which computes it again when the model is loaded")
        self.advice = "pass an example that does"  # for idle weights
        self.codes = 1  # the next free code
        self.is_example = False  # the call that is traced is the user's example
        self._ordered: list[Source] = []

    def source(self, key: Any, kind: str, name: str, size: int, product: Product | None = None) -> Source:
        """The source with that key, created on first use; its codes stay the same."""
        if key not in self.sources:
            self.sources[key] = Source(kind, name, self.codes, size, product)
            self._ordered.append(self.sources[key])
            self.codes += size
        return self.sources[key]

    def uses(self) -> dict[str, list[Product]]:
        """The products with each weight, by its name."""
        found: dict[str, list[Product]] = defaultdict(list)
        for source in self.sources.values():
            if source.product is not None and (source.kind != "table" or source.reads):
                found[source.product.view.parameter].append(source.product)
        return found

    def readers_of(self, parameter: str) -> list[str]:
        """The operations that read a parameter and are no product."""
        unseen = {str(by) for by in self.rowless.get(parameter, ()) if by.place not in self.with_rows}
        return sorted(unseen | self.weight_consumers.get(parameter, set()))

    def by_code(self, codes: Tensor) -> Iterator[tuple[Source, Tensor]]:
        """The sources that these codes belong to, each with its own codes, sorted."""
        codes = varying(codes).unique()
        codes = codes[codes > ZERO]
        while codes.numel():
            source = self._ordered[bisect_right(self._ordered, float(codes[0]), key=lambda source: source.base) - 1]
            count = int(torch.searchsorted(codes, source.base + source.size))
            yield source, codes[:count]
            codes = codes[count:]

    def streams(self) -> dict[int, int]:
        """The stream of each source, by first codes: those added to each other are one stream."""
        sources = self.sources.values()
        added = [(source.base, part.base) for source in sources for pairs, _ in source.terms
                 for part, own in self.by_code(pairs[:, 0])
                 if part.kind != "product" or len(own) == part.size]  # fmt: skip  # chunks go to several streams
        first = components(self.codes, added)
        return {source.base: int(first[source.base]) for source in sources}


def joined(known: Tensor | None, rows: Tensor) -> Tensor:
    """The rows of several calls together, each once."""
    return rows if known is None or torch.equal(known, rows) else torch.cat([known, rows]).unique(dim=0)


def everywhere(code: float, shape: torch.Size) -> Tensor:
    """A shadow with one code everywhere."""
    return torch.full((), code, dtype=torch.float64, device="cpu").expand(shape)


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
