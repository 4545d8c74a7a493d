"""Carry out a plan: put the gains and shifts of norms into the weights beside them."""

import torch
from torch import Tensor, nn

from normkit.norms import LayerNorm, Norm, RMSNorm
from normkit.transforms.fastpath import leave_fast_path
from normkit.transforms.foreign import equivalent, read
from normkit.transforms.layout import channels_first
from normkit.transforms.masks import remove_routes
from normkit.transforms.plan import Plan, new_bias
from normkit.transforms.trace import FOREIGN, Place, Product, Source, Trace


class Affine(nn.Module):
    """What is left of a norm where the model adds its output to something: `x * weight + bias`, either may be None.

    >>> Affine(torch.tensor([2.0]), torch.tensor([1.0]))(torch.tensor([[3.0]])).item()
    7.0
    """

    def __init__(self, weight: Tensor | None, bias: Tensor | None, channel_dim: int = -1):
        super().__init__()
        self.weight = None if weight is None else nn.Parameter(weight)
        self.bias = None if bias is None else nn.Parameter(bias)
        self.channel_dim = channel_dim

    def forward(self, x: Tensor) -> Tensor:
        """One multiply-add."""
        shape = [1] * x.dim()
        shape[self.channel_dim] = -1
        if self.weight is None:
            return x if self.bias is None else x + self.bias.view(shape)
        y = x * self.weight.view(shape)
        return y if self.bias is None else torch.addcmul(self.bias.view(shape), x, self.weight.view(shape))


@torch.no_grad()
def absorb(model: nn.Module, trace: Trace, plan: Plan) -> nn.Module:
    """Carry out `plan` on a model, in place; the arithmetic is in float64 whatever the model's type."""
    norms = {name: model.get_submodule(name) for name in plan.fates}
    splits = {}
    for name, module in norms.items():
        norm = module if isinstance(module, Norm) else equivalent(read(module))
        rest, scale, shift = norm.split()
        splits[name] = rest, scale.double().cpu(), shift.double().cpu()
    edit = Edit(model)
    _forwards(model, trace, plan, splits, edit)
    _backwards(model, trace, plan, splits, edit)
    edit.write()
    for name, fate in plan.fates.items():
        if fate.action != "kept":
            _replace(model, name, fate.action, norms[name], trace.norms[name], *splits[name])
    leave_fast_path(model)
    if not any(isinstance(module, Norm) for module in model.modules()):
        remove_routes(model)
    return model


def _forwards(model: nn.Module, trace: Trace, plan: Plan, splits: dict, edit: "Edit") -> None:
    """`b += W shift` with the weights as they were, then `W *= scale`."""
    scale, shift = torch.ones(trace.codes), torch.zeros(trace.codes)
    scale, shift = scale.double(), shift.double()
    for name in plan.forward:
        source = trace.sources["norm", name]
        s, t = splits[name][1:]
        _spread(source, s, torch.zeros_like(t) if plan.fates[name].action == "add" else t, scale, shift)
    factors: dict[str, Tensor] = {}
    deltas: dict[tuple[Place, int], Tensor] = {}
    for product in dict.fromkeys(p for products in plan.forward.values() for p in products):
        codes = trace.codes_in[product].clamp(min=0).long()
        followed = trace.codes_in[product] != FOREIGN
        weight = product.view.of(edit.value(product.view.parameter))
        s, t = torch.where(followed, scale[codes], 1.0), torch.where(followed, shift[codes], 0.0)
        delta = (weight * t[:, :, None, None]).sum((1, 2)).flatten()
        if bool((delta != 0).any()):
            deltas[_bias(model, trace, product)] = delta
        whole = factors.setdefault(product.view.parameter, torch.ones_like(edit.value(product.view.parameter)))
        product.view.of(whole).copy_(s[:, :, None, None].expand(product.view.size))
    for (place, length), delta in deltas.items():
        edit.stretch(place, length).add_(delta)
    for name, factor in factors.items():
        edit.value(name).mul_(factor)


def _spread(source: Source, s: Tensor, t: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Write a norm's numbers at its codes, and at those of its multiples: `f (s x + t) = s (f x) + f t`."""
    scale[source.base : source.base + source.size] = s
    shift[source.base : source.base + source.size] = t
    for each in source.reads:
        if isinstance(each.by, Source) and len(each.by.terms) == 1 and each.by.terms[0] is not None:
            pairs, factor = each.by.terms[0]
            own = pairs[torch.isin(pairs[:, 0], each.codes)]
            inner_s, inner_t = torch.ones(each.by.size).double(), torch.zeros(each.by.size).double()
            index = (own[:, 0] - source.base).long()
            inner_s[own[:, 1].long()], inner_t[own[:, 1].long()] = s[index], factor * t[index]
            _spread(each.by, inner_s, inner_t, scale, shift)


def _backwards(model: nn.Module, trace: Trace, plan: Plan, splits: dict, edit: "Edit") -> None:
    """`W = scale W` by output, `b = scale b + shift`; a table takes the shift itself."""
    for name, writers in plan.backward.items():
        _, scale, shift = splits[name]
        for writer in writers:
            view = writer.product.view
            s, t = torch.ones(view.outputs).double(), torch.zeros(view.outputs).double()
            s[writer.out], t[writer.out] = scale[writer.channel], writer.share * shift[writer.channel]
            weight = view.of(edit.value(view.parameter))
            weight.mul_(s.view(view.size[0], 1, 1, view.size[3]))
            if writer.product.kind in ("embedding", "table"):
                weight.add_(t.view(view.size[0], 1, 1, view.size[3]))
                continue
            if writer.product in trace.biases or bool((t != 0).any()):
                edit.stretch(*_bias(model, trace, writer.product)).mul_(s).add_(t)


def _bias(model: nn.Module, trace: Trace, product: Product) -> tuple[Place, int]:
    place = trace.biases.get(product)
    return new_bias(model, trace, product) if place is None else (place, trace.sizes[place.parameter])


class Edit:
    """Parameters under change, as contiguous float64 copies; `write` puts them back, in their own type."""

    def __init__(self, model: nn.Module):
        self.model, self.values = model, {}

    def value(self, name: str, length: int | None = None) -> Tensor:
        """A parameter or buffer as it stands; zeros of this length for a bias that is not there yet."""
        if name not in self.values:
            owner, _, key = name.rpartition(".")
            tensor = getattr(self.model.get_submodule(owner), key)
            if tensor is None:
                assert length is not None
                self.values[name] = torch.zeros(length, dtype=torch.float64)
            else:
                self.values[name] = tensor.detach().double().cpu().clone(memory_format=torch.contiguous_format)
        return self.values[name]

    def stretch(self, place: Place, length: int) -> Tensor:
        """A stretch of a bias that is `length` long in all."""
        return self.value(place.parameter, length).flatten()[place.offset : place.offset + place.length]

    def write(self) -> None:
        """Put everything back."""
        for name, value in self.values.items():
            owner, _, key = name.rpartition(".")
            module = self.model.get_submodule(owner)
            tensor = getattr(module, key)
            if tensor is None:
                weight = next(p for k, p in module.named_parameters(recurse=False) if "weight" in k)
                setattr(module, key, nn.Parameter(value.to(weight.device, weight.dtype), weight.requires_grad))
                if isinstance(module, nn.MultiheadAttention) and module.out_proj.bias is None:
                    module.out_proj.bias = nn.Parameter(weight.new_zeros(module.embed_dim), weight.requires_grad)
            else:
                tensor.copy_(value)


def _replace(
    model, name: str, action: str, old: nn.Module, channel_dim: int, rest: nn.Module, scale: Tensor, shift: Tensor
) -> None:
    like = next((t for t in [*old.parameters(), *old.buffers()] if t.dtype.is_floating_point), None)
    like = next(model.parameters()) if like is None else like
    if action in ("folded", "folded back"):
        new: nn.Module = nn.Identity()
    elif action == "multiply-add":
        new = Affine(scale.to(like), None if not bool((shift != 0).any()) else shift.to(like), channel_dim)
    elif action == "add":
        new = Affine(None, (shift / scale).to(like), channel_dim)
    else:
        new = _plain(rest, channel_dim).to(like.device)
    model.set_submodule(name, new.train(old.training))


def _plain(rest: nn.Module, channel_dim: int) -> nn.Module:
    """PyTorch's own version of a norm without parameters where there is one."""
    if channel_dim == -1 and type(rest) is LayerNorm:
        return nn.LayerNorm(rest.dim, rest.eps, elementwise_affine=False)
    if channel_dim == -1 and type(rest) is RMSNorm and rest.eps_at == "inside":
        return nn.RMSNorm(rest.dim, rest.eps, elementwise_affine=False)
    return rest if channel_dim == -1 else channels_first(rest)
