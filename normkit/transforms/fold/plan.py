"""What can become of each norm, decided from a trace of the model and from nothing else."""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from normkit.norms import Norm
from normkit.transforms.fold.trace import FOREIGN, Place, Product, Source, Trace
from normkit.transforms.layout import is_layout_hook
from normkit.transforms.masks import GiveMask
from normkit.transforms.third_party import equivalent, read


@dataclass(frozen=True)
class Outcome:
    """What becomes of one norm: `action`, `into` which layers, or `why` not; `saved` parameters."""

    name: str
    norm: str
    position: str
    action: str  # "folded", "folded back", "multiply-add", "add", "gain folded", "kept"
    into: tuple[str, ...] = ()
    why: str = ""
    saved: int = 0


class Blocked(Exception):
    """Why a norm cannot be absorbed; the text is a reason for the report."""


@dataclass
class Plan:
    """The decision for every norm, and what it takes to carry it out."""

    fates: dict[str, Outcome] = field(default_factory=dict)
    forward: dict[str, list[Product]] = field(default_factory=dict)  # norm: products that absorb it
    backward: dict[str, list["Writer"]] = field(default_factory=dict)  # norm: what writes its input


@dataclass(frozen=True, eq=False)
class Writer:
    """A product or table that writes a norm's input: its outputs `out` become channels `channel` of the norm.

    `share` is how much of the norm's shift it takes over: 0, or 1 over the factor that follows it.
    """

    product: Product
    out: Tensor
    channel: Tensor
    share: float


class FoldPlanner:
    """Decides; ask `plan()`."""

    def __init__(self, trace: Trace, model: nn.Module, refused: dict[str, str] | None = None):
        self.trace, self.model, self.refused = trace, model, refused or {}
        self.reads = _CodeMaps(trace, trace.codes_in.get)
        self.writes = _CodeMaps(trace, None)
        used = {s.product.view.parameter for s in trace.sources.values() if s.product} | set(trace.weight_readers)
        used |= {
            key for key, p in model.named_parameters() if key.startswith(tuple(f"{norm}." for norm in trace.norms))
        }
        self.idle = {key: p.shape for key, p in model.named_parameters() if key not in used and _is_matrix(p)}

    def plan(self) -> Plan:
        """The fate of every norm of the trace."""
        plan = Plan()
        for name in self.trace.norms:
            plan.fates[name] = self._decide(name, plan)
        return plan

    def _decide(self, name: str, plan: Plan) -> Outcome:
        module = self.model.get_submodule(name)
        norm = module if isinstance(module, Norm) else equivalent(read(module))
        own = sum(p.numel() for p in module.parameters())
        fate = Outcome(name, norm.spec, self.position(name), "kept")
        source = self.trace.sources.get(("norm", name))
        if source is None:
            return replace(fate, why="it never ran")
        if name in self.refused:
            return replace(fate, why=self.refused[name])
        if own_hooks(module):
            return replace(fate, why="it has hooks of its own, which see its output")
        rest, scale, shift = norm.split()
        own -= sum(p.numel() for p in rest.parameters())
        trivial = bool((scale == 1).all() and (shift == 0).all())
        if trivial:
            if norm.offline:
                return replace(fate, action="folded", why="it is the identity", saved=own)
            return replace(fate, why="statistics of each token are computed at inference; no gain or bias to fold")
        try:
            self.require_used(norm.dim)
            products, padded = self.readers(source)
            new = sum(
                p.view.outputs for p in dict.fromkeys(products) if bool((shift != 0).any()) and self.lacks_bias(p)
            )
            if padded and bool((shift != 0).any()):
                if not norm.offline or bool((scale == 0).any()):
                    raise Blocked("zero padding between the norm and its reader, which a shift would change")
                plan.forward[name] = products
                why = "zero padding between the norm and its reader: the gain is folded, one addition stays"
                return replace(fate, action="add", into=self.names(products), why=why, saved=own - norm.dim)
            if bool((shift != 0).any()):
                self.check_biases(products)
            plan.forward[name] = products
            action = "folded" if norm.offline else "gain folded"
            why = "" if norm.offline else "statistics of each token are computed at inference"
            return replace(fate, action=action, into=self.names(products), why=why, saved=own - new)
        except Blocked as error:
            reason = str(error)
        if not norm.offline:
            return replace(fate, why=reason)
        try:
            self.require_used(norm.dim)
            writers = self.writers(name)
            if bool((shift != 0).any()):
                self.check_biases([w.product for w in writers if w.share])
            plan.backward[name] = writers
            new = sum(w.product.view.outputs for w in writers if w.share and self.lacks_bias(w.product))
            into = self.names([w.product for w in writers])
            return replace(fate, action="folded back", into=into, why=reason, saved=own - new)
        except Blocked as error:
            why = reason if str(error) == reason else f"{reason}; nor into what precedes it: {error}"
            kept = norm.dim * (1 + bool((shift != 0).any()))
            return replace(fate, action="multiply-add", why=why, saved=own - kept)

    def require_used(self, channels: int) -> None:
        """Blocked where a weight could read these channels and no call used it: an expert, another head, a branch."""
        if idle := [name for name, shape in self.idle.items() if channels in shape]:
            raise Blocked(f"no call that was tried used {_listed(idle)}, which may read it; give an example that does")

    # -- forwards -----------------------------------------------------------------------------------------------------

    def readers(self, source: Source) -> tuple[list[Product], bool]:
        """The products that read a source, and whether zero padding comes between; Blocked if anything else does."""
        products, others = [], []
        for each in source.reads:
            if isinstance(each.by, Product):
                products.append(each.by)
            elif isinstance(each.by, Source) and len(each.by.terms) == 1:
                products += self.readers(each.by)[0]
            else:
                others.append(_reader(each.by))
        if others:
            raise Blocked(f"read by {_listed(others)}")
        if not products:
            raise Blocked("nobody reads it")
        for product in products:
            self.reads.require(product)
        return list(dict.fromkeys(products)), any(p in self.trace.padded for p in products)

    # -- backwards ----------------------------------------------------------------------------------------------------

    def writers(self, name: str) -> list[Writer]:
        """The layers and tables that write a norm's input and nothing else; Blocked if there is more to it."""
        pairs = self.trace.inputs.get(name)
        if pairs is None:
            raise Blocked("its input is not the output of layers alone")
        found = self._writers(pairs, f"norm {name}", 1.0)
        if len({w.product for w in found}) < len(found):
            raise Blocked("a layer writes its input in two ways")
        return found

    def _writers(self, pairs: Tensor, reader: "Source | str", share: float) -> list[Writer]:
        """Of the given pairs (code, channel); `share` of a shift goes to them."""
        found = []
        for source, codes in self.trace.by_code(pairs[:, 0]):
            own = pairs[torch.isin(pairs[:, 0], codes)]
            if own[:, 0].unique().numel() < len(own):
                raise Blocked(f"{source.name} is used for several channels at once")
            for read_ in source.reads:
                if read_.by != reader and bool(torch.isin(read_.codes, codes).any()):
                    raise Blocked(f"its input is also read by {_reader(read_.by)}")
            out = (own[:, 0] - source.base).long()
            if source.product is not None:
                self.writes.require(source.product)
                found.append(Writer(source.product, out, own[:, 1].long(), share))
            elif source.kind == "norm":
                raise Blocked(f"its input is the output of norm {source.name}")
            elif source.kind == "input":
                raise Blocked("its input is what the caller passes")
            else:
                for index, term in enumerate(source.terms):
                    if term is None:
                        raise Blocked("its input is a sum with something that is no layer's output")
                    channel_of = torch.full((source.size,), -1, dtype=torch.float64)
                    channel_of[out] = own[:, 1]
                    inner = torch.stack([term[0][:, 0], channel_of[term[0][:, 1].long()]], 1)
                    found += self._writers(inner[inner[:, 1] >= 0], source, share / term[1] if index == 0 else 0.0)
        return found

    # -- biases -------------------------------------------------------------------------------------------------------

    def lacks_bias(self, product: Product) -> bool:
        """Whether a bias would have to be made."""
        return product.kind not in ("embedding", "table") and self.trace.biases.get(product) is None

    def check_biases(self, products: list[Product]) -> None:
        """Blocked unless each product has a bias of its own, or can be given one."""
        for product in products:
            if product.kind in ("embedding", "table"):
                continue
            where = self.trace.biases.get(product)
            if where is None:
                new_bias(self.model, self.trace, product)
                continue
            if readers := self.trace.weight_readers.get(where.parameter):
                raise Blocked(f"{where.parameter} is also read by {_listed(sorted(readers))}")
            for other, place in self.trace.biases.items():
                if other.view != product.view and _overlap(place, where):
                    raise Blocked(f"{where.parameter} is also the bias of another product")

    # -- words --------------------------------------------------------------------------------------------------------

    def names(self, products: list[Product]) -> tuple[str, ...]:
        """The layers of these products."""
        return tuple(dict.fromkeys(p.view.parameter.removesuffix(".weight") for p in products))

    def position(self, name: str) -> str:
        """Where a norm stands: pre, post, final, embedding, or inner to a block."""
        source, pairs = self.trace.sources.get(("norm", name)), self.trace.inputs.get(name)
        if source is None:
            return "unused"
        adds = any(isinstance(r.by, Source) and len(r.by.terms) > 1 for r in source.reads)
        if pairs is None:
            return "post" if adds else "inner"
        before = [s for s, _ in self.trace.by_code(pairs[:, 0])]
        stream = any(isinstance(r.by, Source) and len(r.by.terms) > 1 for s in before for r in s.reads)
        if stream and not adds:
            return "pre"
        leaves = self._leaves(before, set())
        given = [r.by for s in self.trace.sources.values() if s.kind == "input" for r in s.reads]
        deep = leaves == {"convolution"} and not any(s.product in given for s in before)  # no patches, a CNN's layer
        if leaves <= {"embedding", "table", "convolution"} and not deep:
            return "embedding"
        summed = [s for s in before if s.kind == "sum" and len(s.terms) > 1]
        if adds or any(t is not None and any(p.kind == "norm" for p, _ in self.trace.by_code(t[0][:, 0]))
                       for s in summed for t in s.terms):  # fmt: skip
            return "post"
        return "final" if summed else "inner"

    def _leaves(self, sources: list[Source], seen: set[int]) -> set[str]:
        kinds: set[str] = set()
        for source in sources:
            if source.base in seen:
                continue
            seen.add(source.base)
            if source.product is not None:
                kinds.add(source.product.kind)
            elif source.kind == "norm":
                kinds.add("norm")
            for term in source.terms:
                if term is None:
                    kinds.add("unknown")
                else:
                    kinds |= self._leaves([s for s, _ in self.trace.by_code(term[0][:, 0])], seen)
        return kinds


class _CodeMaps:
    """For each parameter: which channel each of its elements multiplies (or writes), if all its uses agree."""

    def __init__(self, trace: Trace, codes_of):
        self.trace, self.codes_of = trace, codes_of
        self.problems: dict[str, str | None] = {}

    def require(self, product: Product) -> None:
        """Blocked unless every use of the product's weight is a product, and all agree."""
        name = product.view.parameter
        if name not in self.problems:
            self.problems[name] = self._problem(name)
        if self.problems[name] is not None:
            raise Blocked(self.problems[name])

    def _problem(self, name: str) -> str | None:
        if name in self.trace.entangled:
            return f"{name} shares memory with {self.trace.entangled[name]}"
        if readers := self.trace.weight_readers.get(name):
            return f"{name} is also read by {_listed(sorted(readers))}"
        own = [s for s in self.trace.sources.values() if s.product and s.product.view.parameter == name]
        uses = list(dict.fromkeys(s.product for s in own if s.product and (s.product.kind != "table" or s.reads)))
        if len(uses) < 2:
            return None
        seen = torch.full((self.trace.sizes[name],), torch.nan, dtype=torch.float64)
        for index, use in enumerate(uses):
            if self.codes_of is None:
                codes = torch.full(use.view.size, float(index), dtype=torch.float64)
            else:
                known = self.codes_of(use)
                known = torch.full(use.view.size[:2], FOREIGN, dtype=torch.float64) if known is None else known
                codes = known[:, :, None, None].expand(use.view.size)
            window = use.view.of(seen)
            if bool(((window != codes) & ~window.isnan()).any()):
                tied = next((u for u in uses if u.kind == "embedding"), None)
                if tied is not None and any(u.kind != "embedding" for u in uses):
                    return f"{name} is tied to an embedding; untie=True gives the output layer a copy of its own"
                return f"{name} is used in several places that differ"
            window.copy_(codes)
        return None


def new_bias(model: nn.Module, trace: Trace, product: Product) -> tuple[Place, int]:
    """Where a bias could be made for a product without, and how long it is in all.

    Blocked where the layer's own forward did not run, so that nobody would read it.
    """
    for owner, key in trace.owners[product.view.parameter]:
        module = model.get_submodule(owner)
        if product.owner != owner:
            continue
        prefix = f"{owner}." if owner else ""
        if isinstance(module, nn.MultiheadAttention):
            width = module.embed_dim
            row = {"in_proj_weight": product.view.offset // max(1, product.view.size[1]), "q_proj_weight": 0,
                   "k_proj_weight": width, "v_proj_weight": 2 * width}.get(key)  # fmt: skip
            if row is not None:
                return Place(f"{prefix}in_proj_bias", row, product.view.outputs), 3 * width
        elif key == "weight" and "bias" in module._parameters and module.bias is None:
            return Place(f"{prefix}bias", 0, product.view.outputs), product.view.outputs
    raise Blocked(
        f"{product.view.parameter} has no bias to take the shift, and is used outside its own layer's forward"
    )


def _is_matrix(parameter: Tensor) -> bool:
    return sum(length > 1 for length in parameter.shape) > 1


def own_hooks(module: nn.Module) -> bool:
    """Whether a norm has hooks that are not ours."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return not all(is_layout_hook(hook) or isinstance(hook, GiveMask) for hook in hooks)


def _overlap(a: Place, b: Place) -> bool:
    return a.parameter == b.parameter and a.offset < b.offset + b.length and b.offset < a.offset + a.length


def _reader(by: "Product | Source | str") -> str:
    if isinstance(by, Source):
        return f"a sum in {by.name or 'the model'}" if len(by.terms) > 1 else f"a product in {by.name or 'the model'}"
    return by if isinstance(by, str) else by.view.parameter


def _listed(names: list[str], most: int = 3) -> str:
    names = list(dict.fromkeys(names))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
