"""Carry out a plan: put the gains and shifts of norms into the weights beside them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normkit.norms import LayerNorm, Norm, RMSNorm
from normkit.transforms.affine import Affine
from normkit.transforms.convert import put
from normkit.transforms.fastpath import leave_fast_path
from normkit.transforms.fold.plan import Plan, new_bias
from normkit.transforms.fold.trace import FOREIGN, Place, Product, Source, Trace, View
from normkit.transforms.layout import channels_first
from normkit.transforms.masks import remove_routes
from normkit.transforms.third_party import equivalent, read


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
            model = _replace(model, name, fate.action, norms[name], trace.norms[name], *splits[name])
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
    deltas: dict[tuple[Place, int], Tensor] = {}
    factors: dict[str, dict[View, Tensor]] = {}
    for product in dict.fromkeys(p for products in plan.forward.values() for p in products):
        codes = trace.codes_in[product].clamp(min=0).long()
        followed = trace.codes_in[product] != FOREIGN
        s, t = torch.where(followed, scale[codes], 1.0), torch.where(followed, shift[codes], 0.0)
        if bool((t != 0).any()):
            weight = product.view.of(edit.read(product.view.parameter))
            delta = torch.einsum("gkrn,gk->gn", weight, t).flatten()
            if bool((delta != 0).any()):
                deltas[_bias(model, trace, product)] = delta
        factors.setdefault(product.view.parameter, {})[product.view] = s[:, :, None, None]
    for (place, length), delta in deltas.items():
        edit.change(place.parameter, lambda b, place=place, delta=delta: place.of(b).add_(delta), length)
    for name, views in factors.items():
        edit.change(name, lambda w, views=views: _scale(w, views))


def _scale(weight: Tensor, views: dict[View, Tensor]) -> None:
    """Multiply each part by its factor; parts may overlap, an element is multiplied once."""
    if len(views) == 1:
        ((view, factor),) = views.items()
        view.of(weight).mul_(factor)
        return
    whole = torch.ones_like(weight)
    for view, factor in views.items():
        view.of(whole).copy_(factor.expand(view.size))
    weight.mul_(whole)


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
            s, t = s.view(view.size[0], 1, 1, view.size[3]), t.view(view.size[0], 1, 1, view.size[3])
            if writer.product.kind in ("embedding", "table"):
                edit.change(view.parameter, lambda w, view=view, s=s, t=t: view.of(w).mul_(s).add_(t))
                continue
            edit.change(view.parameter, lambda w, view=view, s=s: view.of(w).mul_(s))
            if writer.product in trace.biases or bool((t != 0).any()):
                place, length = _bias(model, trace, writer.product)
                s, t = s.flatten(), t.flatten()
                edit.change(place.parameter, lambda b, place=place, s=s, t=t: place.of(b).mul_(s).add_(t), length)


def _bias(model: nn.Module, trace: Trace, product: Product) -> tuple[Place, int]:
    place = trace.biases.get(product)
    return new_bias(model, trace, product) if place is None else (place, trace.sizes[place.parameter])


class Edit:
    """Changes to parameters, collected and then carried out one parameter at a time, in float64."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.changes: dict[str, list[Callable[[Tensor], object]]] = {}
        self.lengths: dict[str, int] = {}

    def read(self, name: str) -> Tensor:
        """A parameter or buffer as it stands, contiguous, in float64."""
        owner, _, key = name.rpartition(".")
        return getattr(self.model.get_submodule(owner), key).detach().double().cpu().contiguous()

    def change(self, name: str, how: Callable[[Tensor], object], length: int = 0) -> None:
        """Remember to change a parameter in place by `how`; `length` is that of a bias that is not there yet."""
        self.changes.setdefault(name, []).append(how)
        self.lengths[name] = max(length, self.lengths.get(name, 0))

    def write(self) -> None:
        """Carry out the changes."""
        for name, changes in self.changes.items():
            owner, _, key = name.rpartition(".")
            module = self.model.get_submodule(owner)
            tensor = getattr(module, key)
            value = torch.zeros(self.lengths[name], dtype=torch.float64) if tensor is None else self.read(name)
            for change in changes:
                change(value)
            if tensor is not None:
                tensor.copy_(value)
                continue
            weight = next(p for k, p in module.named_parameters(recurse=False) if "weight" in k)
            setattr(module, key, nn.Parameter(value.to(weight.device, weight.dtype), weight.requires_grad))
            if isinstance(module, nn.MultiheadAttention) and module.out_proj.bias is None:
                module.out_proj.bias = nn.Parameter(weight.new_zeros(module.embed_dim), weight.requires_grad)


def _replace(
    model, name: str, action: str, old: nn.Module, channel_dim: int, rest: nn.Module, scale: Tensor, shift: Tensor
) -> nn.Module:
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
    return put(model, name, new.train(old.training))


def _plain(rest: nn.Module, channel_dim: int) -> nn.Module:
    """PyTorch's own version of a norm without parameters where there is one."""
    if channel_dim == -1 and type(rest) is LayerNorm:
        return nn.LayerNorm(rest.dim, rest.eps, elementwise_affine=False)
    if channel_dim == -1 and type(rest) is RMSNorm and rest.eps_at == "inside":
        return nn.RMSNorm(rest.dim, rest.eps, elementwise_affine=False)
    return rest if channel_dim == -1 else channels_first(rest)
