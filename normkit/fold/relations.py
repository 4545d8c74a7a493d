"""Constraints that the nodes of a trace put on the coordinates of the channels.

Every channel has a coordinate `(s, t)`: the folded model computes `v` where the original computed `x = s * v + t`.
Node `c` is the channel with code `c`; node 0 is everything that is not followed, with `s = 1` and `t = 0`.
"""

import inspect
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import listed, unique
from normkit.fold.forest import Forest, unite
from normkit.fold.trace import FOREIGN, ZERO, Product, Rowless, Source, Trace, View
from normkit.models.hooks import LAYOUT_HOOKS
from normkit.models.masks import GiveMask
from normkit.models.third_party import equivalent
from normkit.norms import Norm

TINY = 1e-100  # a gain below this is zero


@dataclass(eq=False)
class NormNode:
    """A norm at inference, `y = scale * rest(x) + shift`.

    `rest` is the identity for an offline norm. `inputs` and `outputs` are nodes, `[channels]`. Channels with a gain
    of zero are cut off: in `dead_reads` by what reads the norm, in `dead_writes` by what writes its input. A norm that
    stays may write another coordinate if its own gain (`takes_scale`) and bias (`takes_shift`) can change. `offset` is
    what its class adds to the weight that it stores.
    """

    name: str
    spec: str
    offline: bool
    inputs: Tensor
    outputs: Tensor
    scale: Tensor
    shift: Tensor
    rest: nn.Module
    takes_scale: bool = False
    takes_shift: bool = False
    offset: float = 0.0

    def __post_init__(self):
        self.dead_reads = self.dead_writes = torch.zeros(len(self.scale), dtype=torch.bool)

    @property
    def trivial(self) -> bool:
        """Its gain is 1 and its bias 0."""
        return bool((self.scale == 1).all() and (self.shift == 0).all())


@dataclass(frozen=True, eq=False)
class Link:
    """`s[a] = s[b] ** exponent` if `scale`, `t[a] = t[b]` if `shift`; `why` for the report."""

    a: Tensor
    b: Tensor
    exponent: int = 1
    scale: bool = True
    shift: bool = True
    why: str = ""

    @property
    def followed(self) -> "Link":
        """The link without its ends at node 0."""
        inner = (self.a > 0) & (self.b > 0)
        return Link(self.a[inner], self.b[inner], self.exponent)


@dataclass(frozen=True, eq=False)
class Equation:
    """`sum over k of factors[:, k] * t[nodes[:, k]] = constant`, if that norm is folded."""

    nodes: Tensor
    factors: Tensor
    constant: Tensor
    norm: str = ""


def equation(*terms: tuple[Tensor, Tensor | float], constant: Tensor | float = 0.0, norm: str = "") -> Equation:
    """The equation `sum of factor * t[nodes] = constant`, from its terms (nodes, factor)."""
    nodes = torch.stack([nodes for nodes, _ in terms], 1)
    numbers = (torch.as_tensor(n, dtype=torch.float64) for n in (*(factor for _, factor in terms), constant))
    *factors, constant = (n.expand(len(nodes)) for n in numbers)
    return Equation(nodes, torch.stack(factors, 1), constant, norm)


class Relations:
    """All links and equations of a trace, and the nodes of its products and norms."""

    def __init__(self, trace: Trace, model: nn.Module, reasons: dict[str, str]):
        self.trace, self.model = trace, model
        self.links: list[Link] = []
        self.equations: list[Equation] = []
        self.norms: dict[str, NormNode] = {}
        self.unshifted: list[Tensor] = []  # what tied output layers without a bias read
        self.kept: dict[str, str] = {}  # norms that stay as they are, with the reason
        self.inputs: dict[Product, Tensor] = {}
        self.outputs = {source.product: source.codes for source in trace.sources.values()
                        if source.product is not None and (source.kind != "table" or source.reads)}  # fmt: skip
        self.uses = trace.uses()
        for name in trace.norms:
            self._norm(name, reasons.get(name))
        for source in trace.sources.values():
            self._source(source)
        for product in self.outputs:
            by = f"a product with {product.view.parameter}"
            self.inputs[product] = self.slots(trace.slots.get(product), product.view.inputs, by)
        self.stream = trace.streams()
        self._weights()
        self._biases()
        idle, tables, beside = unused_weights(trace, model, self.uses)
        for source in trace.sources.values():  # an expert, another head, a branch may use it in a later call
            own = {n: why for (place, n), why in beside.items() if place == source.name.rpartition(".")[0]}
            vectors = own if source.kind == "norm" else tables
            sizes = {source.size, *(by.view.inputs for by in source.reads if isinstance(by, Product))} - {1}
            for length, why in [*idle.items(), *vectors.items()]:
                if any(length % size == 0 for size in sizes):  # also a part, or parts together, as other layers read
                    self.pin(source.codes, why)

    def pin(self, nodes: Tensor, why: str, scale: bool = True) -> None:
        """Let nodes have `t = 0`, and `s = 1` too if `scale`."""
        self.links.append(Link(nodes, torch.zeros_like(nodes), scale=scale, why=why))

    def slots(self, pairs: Tensor | None, size: int, by: str) -> Tensor:
        """The node that `by` reads at each of `size` places, from pairs (code, place).

        Channels that are read at the same place get the same coordinate; where zeros are read as well, `t = 0`.
        """
        if pairs is None:
            return torch.zeros(size, dtype=torch.long)
        codes, places = pairs.long().T
        real = codes > ZERO
        first = torch.full((size,), self.trace.codes)
        first.scatter_reduce_(0, places[real], codes[real], "amin")
        nodes = torch.where(first < self.trace.codes, first, 0)
        read = nodes[places]
        more = real & (codes != read)
        self.links.append(Link(codes[more], read[more], why=f"read by {by} for different inputs"))
        self.pin(read[(codes == FOREIGN) & (read > 0)], f"read by {by} over rows of different origin")
        padded = read[(codes == ZERO) & (read > 0)]
        self.pin(padded, "zero padding, a mask or a factor between the norm and its reader", scale=False)
        return nodes

    # -- norms and sums -----------------------------------------------------------------------------------------------

    def _norm(self, name: str, reason: str | None) -> None:
        source, module = self.trace.sources.get(("norm", name)), self.model.get_submodule(name)
        norm = module if isinstance(module, Norm) else equivalent(self.trace.norms[name])
        rest, scale, shift = norm.split()
        size = norm.dim if source is None else source.size
        inputs = self.slots(self.trace.inputs.get(name), size, f"norm {name}")
        outputs = torch.zeros(size, dtype=torch.long) if source is None else source.codes
        scale, shift = (t.detach().double().cpu().expand(size).clone() for t in (scale, shift))
        scale[scale.abs() < TINY] = 0.0  # its inverse is infinite
        node = NormNode(name, norm.spec, norm.offline, inputs, outputs, scale, shift, rest)
        if not norm.offline:
            offsets = [offset for offset in (0.0, 1.0) if self._is_own(name, "weight", scale - offset)]
            node.takes_scale, node.offset = bool(offsets), sum(offsets)
            node.takes_shift = self._is_own(name, "bias", shift)
        self.norms[name] = node
        if source is None:
            reason = "it never ran"
        elif reason is None and self.trace.keep_architecture and norm.offline:
            reason = "it has frozen statistics, and would vanish; the architecture is kept"
        elif reason is None and self.trace.keep_architecture and not _is_stored(node):
            reason = "its gain and bias are no parameters of this norm alone; the architecture is kept"
        elif reason is None and own_hooks(module):
            reason = "it has hooks of its own, which see its output"
        if reason or not norm.offline:
            self.pin(inputs, f"read by norm {name}")
            node.inputs = torch.zeros_like(inputs)
        if reason:
            self.kept[name] = reason
            self.pin(outputs, f"the output of norm {name}")

    def _is_own(self, name: str, key: str, values: Tensor) -> bool:
        """True if these values are a parameter of this norm alone."""
        own = getattr(self.model.get_submodule(name), key, None)
        if not isinstance(own, nn.Parameter) or len(self.trace.owners[self.trace.names.get(id(own), "")]) > 1:
            return False
        return own.shape == values.shape and torch.allclose(own.detach().double().cpu(), values, rtol=1e-12, atol=1e-15)

    def _source(self, source: Source) -> None:
        if source.kind == "input":
            self.pin(source.codes, "the model input")
        for by, codes in source.reads.items():
            if isinstance(by, Rowless) and by.place in self.trace.with_rows:
                continue  # another call showed what it does
            if isinstance(by, str | Rowless) and not str(by).startswith("norm "):
                self.pin(codes.long(), f"read by {by}")
        where, terms = source.name or "the model", [(source.codes, -1.0)]
        for pairs, factor in source.terms:
            read = self.slots(pairs, source.size, f"a sum in {where}")
            terms.append((read, factor))
            self._equal(source.codes[read > 0], read[read > 0])
            foreign = pairs[pairs[:, 0] == FOREIGN][:, 1].long().unique()
            foreign = source.codes[foreign[read[foreign] == 0]]
            why = f"added to something that is no layer's output in {where}"
            self._equal(foreign, torch.zeros_like(foreign), why=why)
        if source.terms:
            self.equations.append(equation(*terms))

    def _equal(self, a: Tensor, b: Tensor, exponent: int = 1, shift: bool = False, why: str = "") -> None:
        self.links.append(Link(a, b, exponent, shift=shift, why=why))

    # -- weights and biases -------------------------------------------------------------------------------------------

    def _weights(self) -> None:
        """Uses of one array ask for the same change, element by element."""
        for name, products in self.uses.items():
            if name in self.trace.entangled:
                self._keep(products, f"{name} shares memory with {self.trace.entangled[name]}")
            elif consumers := self.trace.readers_of(name):
                self._keep(products, f"{name} is also read by {listed(consumers)}")
            else:
                by_view: dict[View, list[Product]] = defaultdict(list)
                for product in products:
                    by_view[product.view].append(product)
                for views in clusters(by_view):
                    self._tie(name, [product for view in views for product in by_view[view]])

    def _keep(self, products: Iterable[Product], why: str) -> None:
        """Let a weight stay as it is."""
        for product in products:
            if product.kind == "gain":  # it passes the scale on
                self._equal(self.inputs[product], self.outputs[product])
            else:
                self._pin_both(product, why)

    def _pin_both(self, product: Product, why: str, inputs: bool = True, outputs: bool = True) -> None:
        """Let both ends of a product have `t = 0`, and `s = 1` where requested."""
        self.pin(self.inputs[product], why, inputs)
        self.pin(self.outputs[product], why, outputs)

    def _tie(self, name: str, uses: list[Product]) -> None:
        """Let uses that share elements of a weight read and write these in equal coordinates."""
        differ = f"{name} is used in several places that differ"
        if len(uses) > 1 and any(use.kind == "gain" for use in uses):
            self._keep(uses, differ)
            return
        mixed = len({use.takes_shift for use in uses}) > 1
        own = (
            f"untie=True (--untie) gives the output layer a copy of its own, {self.trace.sizes[name]:,} parameters more"
        )
        untied = f"{name} is tied to an embedding; {own}"
        first: dict[View, Product] = {}  # use of each view
        for use in sorted(uses, key=lambda use: not use.takes_shift):
            across = use.view.transposed if use.view.size[::2] == (1, 1) else None
            if same := first.get(use.view):
                shift = use.takes_shift and same.takes_shift
                self._equal(self.inputs[use], self.inputs[same], why=differ)
                self._equal(self.outputs[use], self.outputs[same], shift=shift, why=differ)
            elif across is not None and across in first:
                tied = untied if mixed else differ
                self._equal(self.inputs[use], self.outputs[first[across]], -1, why=tied)
                self._equal(self.outputs[use], self.inputs[first[across]], -1, why=tied)
            else:
                first[use.view] = use
        if len(first) > 1:  # different parts of it, which overlap
            self._keep(uses, differ)
            return
        for use in uses if mixed else ():
            if use.takes_shift:
                self.pin(self.outputs[use], untied, scale=False)
            elif use not in self.trace.biases:
                self.unshifted.append(self.inputs[use])

    def _biases(self) -> None:
        """A product whose bias cannot change, or that can have none, passes no shift."""
        shared: dict[str, list[tuple[Product, View]]] = defaultdict(list)
        for product, nodes in self.outputs.items():
            bias = self.trace.biases.get(product)
            if product.kind == "gain":
                gain = product.view.of(parameter(self.model, product.view.parameter)).flatten()
                self.equations.append(equation((nodes, -1.0), (self.inputs[product], gain)))
            elif bias is None and product.takes_bias and new_bias(self.model, self.trace, product) is None:
                left = "is used outside its own layer's forward"
                if self.trace.keep_architecture:
                    left = "the architecture is kept"
                elif ".lora_" in product.owner:
                    left = "peft would drop one"
                why = f"{product.view.parameter} has no bias to take the shift, and {left}"
                self._pin_both(product, why, inputs=False, outputs=False)
            elif bias is not None:
                shared[bias.parameter].append((product, bias))
                consumers = sorted(self.trace.weight_consumers.get(bias.parameter, ()))
                if consumers or bias.parameter in self.uses or bias.parameter in self.trace.entangled:
                    why = f"{bias.parameter} is also read by {listed(consumers) or 'something else'}"
                    self._pin_both(product, why, inputs=False)
        for name, uses in shared.items():
            why = f"{name} is also the bias of another product"
            parts: dict[View, Product] = {}  # first use of each part of a bias
            for product, view in uses:
                if (first := parts.setdefault(view, product)) is product:
                    continue
                if product.view == first.view:
                    self._equal(self.inputs[product], self.inputs[first], shift=True, why=why)
                    self._equal(self.outputs[product], self.outputs[first], shift=True, why=why)
                else:
                    self._pin_both(product, why, inputs=False)
                    self._pin_both(first, why, inputs=False)
            for views in clusters(parts):
                for view in views if len(views) > 1 else ():
                    self._pin_both(parts[view], why, inputs=False)

    # -- reasons ------------------------------------------------------------------------------------------------------

    def fixed_by(self, streams: set[int], shifts: bool = True) -> str:
        """The reasons why the coordinates of some streams are given; those of shifts alone only if `shifts`."""
        pins, unshifted, ties = kinds = [], [], []
        for link in self.links:
            if link.why and streams & self.streams_of(torch.cat([link.a, link.b])):
                (ties if bool((link.a * link.b > 0).any()) else pins if link.scale else unshifted).append(link.why)
        whys = unique(next(filter(None, kinds if shifts else (pins, ties)), ()))
        reads = [why.removeprefix("read by ") for why in whys if why.startswith("read by ")]
        others = [why for why in whys if not why.startswith("read by ")]
        return ", ".join([f"read by {listed(reads)}"] * bool(reads) + others[:3])

    def streams_of(self, nodes: Tensor) -> set[int]:
        """The streams that some nodes belong to."""
        return {self.stream[source.base] for source, _ in self.trace.by_code(nodes.double())}


def clusters(views: Iterable[View]) -> list[list[View]]:
    """Views of a parameter in groups whose stretches of memory do not meet."""
    found: list[list[View]] = []
    end = 0
    for view in sorted(views, key=lambda view: view.offset):
        if view.offset >= end:
            found.append([])
        found[-1].append(view)
        end = max(end, view.end)
    return found


def unused_weights(trace: Trace, model: nn.Module, used: dict[str, list[Product]]) -> list[dict[Any, str]]:
    """Weights that no call used all of, by channels: what may read as many, and vectors.

    A vector may be added to tokens, or take their place. Those beside a norm, by module, may be gains of its output.
    Those of modules for other inputs are left out.
    """
    apart = tuple(f"{name}." for name in trace.other_inputs)
    known = {*trace.weight_consumers, *(bias.parameter for bias in trace.biases.values())}
    own = tuple(f"{norm}." for norm in trace.norms)
    readers, vectors, gains = names = [defaultdict[Any, list[str]](list) for _ in range(3)]
    norms = [(norm, torch.ones(each.dim)) for norm, each in trace.norms.items() if ("norm", norm) not in trace.sources]
    for key, p in [*model.named_parameters(), *model.named_buffers(), *norms]:
        products = used.get(key, ())
        if p.is_floating_point() and not key.startswith((*own, *apart)) and key not in known and unused(p, products):
            owner, layers = key.rpartition(".")[0], nn.Linear | nn.modules.conv._ConvNd
            has_one_output = p.dim() > 1 and p.shape[0] == 1 and isinstance(model.get_submodule(owner), layers)
            lengths = [length for length in p.shape if length > 1]
            for length in {*lengths}:
                (vectors if len(lengths) == 1 and not has_one_output else readers)[length].append(key)
            for place in {owner, owner if any(model.get_submodule(owner).children()) else owner.rpartition(".")[0]}:
                gains[place, p.numel()].append(key)
    found = []
    for of, does in zip(names, ("read it", "be added to it", "change it"), strict=True):
        parts = {n: listed(f"all of {key}" if key in used else key for key in keys) for n, keys in of.items()}
        texts = {n: f"no call that was tried used {part}, which may {does}" for n, part in parts.items()}
        found.append({n: f"{text}; {trace.advice}" for n, text in texts.items()})
    return found


def unused(weight: Tensor, products: Iterable[Product]) -> int:
    """The number of elements of a weight that no product uses; of tables other inputs read more."""
    whole = (prod(each.view.size) == weight.numel() or (each.takes_shift and weight.dim() < 3) for each in products)
    if any(whole):
        return 0
    used = torch.zeros(weight.numel(), dtype=torch.bool)
    for product in products:
        product.view.of(used).fill_(True)
    return int((~used).sum())


def united(size: int, links: list[Link]) -> Forest:
    """The classes of nodes that links connect, and the exponent of each node to its class."""
    a = torch.cat([torch.zeros(0, dtype=torch.long), *(link.a for link in links)])
    b = torch.cat([torch.zeros(0, dtype=torch.long), *(link.b for link in links)])
    exponents = [torch.full((len(link.a),), float(link.exponent), dtype=torch.float64) for link in links]
    exponent = torch.cat([torch.zeros(0, dtype=torch.float64), *exponents])
    return unite(size, a, b, exponent, torch.ones_like(exponent))


def new_bias(model: nn.Module, trace: Trace, product: Product) -> tuple[View, int] | None:
    """The place of a bias to be made for a product, and the length of the parameter.

    None if the layer's own forward did not run, so that nothing would read the bias, or a merge would drop it, or the
    architecture is kept.
    """
    if trace.keep_architecture:
        return None
    owner, view = product.owner, product.view
    module, prefix = model.get_submodule(owner), f"{owner}." if owner else ""
    for key in (key for name, key in trace.owners[view.parameter] if name == owner):
        if isinstance(module, nn.MultiheadAttention):
            width = module.embed_dim
            row = {"in_proj_weight": view.offset // max(1, view.size[1]), "q_proj_weight": 0,
                   "k_proj_weight": width, "v_proj_weight": 2 * width}.get(key)  # fmt: skip
            if row is not None:
                return View.row(f"{prefix}in_proj_bias", view.outputs, row), 3 * width
        elif key == "weight" and "bias" in module._parameters and module.bias is None and ".lora_" not in owner:
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            if code and not {"bias", "forward"} & {*code.co_names}:  # a subclass that ignores its bias
                return None
            return View.row(f"{prefix}bias", view.outputs), view.outputs
    return None


def parameter(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by name, contiguous, in float64."""
    owner, _, key = name.rpartition(".")
    return getattr(model.get_submodule(owner), key).detach().double().cpu().contiguous()


def _is_stored(node: NormNode) -> bool:
    """True if a norm's gain and bias are parameters of its own, where they are not 1 and 0."""
    gain, bias = bool((node.scale != 1).any()), bool((node.shift != 0).any())
    return node.takes_scale >= gain and node.takes_shift >= bias


def own_hooks(module: nn.Module) -> bool:
    """True if a norm has hooks that the user registered."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not all(hook in LAYOUT_HOOKS or isinstance(hook, GiveMask) for hook in hooks)
