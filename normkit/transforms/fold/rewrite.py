"""Rewrite a model in new coordinates: weights, biases, tables, the rest of each norm."""

import copy
from collections.abc import Callable
from math import prod

import torch
from torch import Tensor, nn

from normkit.norms import LayerNorm, Norm, RMSNorm
from normkit.transforms.affine import Affine
from normkit.transforms.convert import put
from normkit.transforms.fastpath import leave_fast_path
from normkit.transforms.fold.plan import FoldPlan
from normkit.transforms.fold.relations import NormNode, parameter
from normkit.transforms.fold.report import GONE
from normkit.transforms.fold.trace import Place, Product, Source, View
from normkit.transforms.layout import channels_first
from normkit.transforms.masks import remove_routes

Part = tuple[View, Tensor, Tensor, Tensor]  # of a weight, its factors by input and by output, and what is subtracted


@torch.no_grad()
def rewrite(model: nn.Module, plan: FoldPlan) -> nn.Module:
    """Carry out a plan on a model in place, with arithmetic in float64."""
    edit = Edit(model)
    _weights(plan, edit)
    _biases(plan, edit)
    for source in plan.relations.trace.sources.values():
        if source.gains is not None:
            _gains(source, plan, edit)
    edit.write()
    for name, outcome in plan.outcomes.items():
        if outcome.action == "gain changed":
            norm = model.get_submodule(name)
            own = (norm.weight, getattr(norm, "bias", None))
            for parameter, value in zip(own, plan.affine(plan.relations.norms[name]), strict=True):
                if isinstance(parameter, Tensor):
                    parameter.copy_(value)
        elif outcome.action != "kept":
            model = _replace(model, plan, plan.relations.norms[name], outcome.action)
    leave_fast_path(model)
    if not any(isinstance(module, Norm) for module in model.modules()):
        remove_routes(model)
    return model


def largest_factor(plan: FoldPlan) -> float:
    """The largest number that an element of a weight is multiplied by."""
    factors = [_factors(plan, product) for product in plan.relations.inputs]
    return max(
        (float(read.abs().max() * written.abs().max()) for read, written in factors if read.numel()), default=1.0
    )


def _factors(plan: FoldPlan, product: Product) -> tuple[Tensor, Tensor]:
    """The factors of a weight by input and by output; their product is `[groups, in, 1, out]`."""
    groups, inputs, _, outputs = product.view.size
    writes = plan.relations.outputs[product]
    read = plan.at.scale[plan.relations.inputs[product]].view(groups, inputs, 1, 1)
    return read, (plan.at.written[writes] / plan.at.scale[writes]).view(groups, 1, 1, outputs)


def _weights(plan: FoldPlan, edit: "Edit") -> None:
    """`W <- diag(1 / s_out) W diag(s_in)`; a table `E <- (E - t) / s`."""
    changed: dict[str, list[Part]] = {}
    tables = {source.product: source for source in plan.relations.trace.sources.values() if source.kind == "table"}
    for product in plan.relations.inputs:
        read, written = _factors(plan, product)
        shift = torch.zeros_like(written)
        if product.adds:
            nodes = plan.relations.outputs[product]
            shift = (plan.at.shift[nodes] / plan.at.scale[nodes]).view(written.shape)
        if product in tables:
            shape = parameter(edit.model, product.view.parameter).shape
            written, shift = _of_longer_inputs(tables[product], shape, written, shift)
        if bool((read != 1).any() | (written != 1).any() | (shift != 0).any()):
            changed.setdefault(product.view.parameter, []).append((product.view, read, written, shift))
    for name, parts in changed.items():
        edit.change(name, lambda weight, parts=parts: _multiply(weight, parts))


def _of_longer_inputs(table: Source, shape: torch.Size, *changes: Tensor) -> list[Tensor]:
    """Change rows of a table that only longer inputs read as the rows before them."""
    if len(shape) < 2:
        return list(changes)
    read = torch.zeros(table.size, dtype=torch.bool)
    for codes in table.reads.values():
        read[(codes - table.base).long()] = True
    read = read.view(shape)
    lines = [read.movedim(axis, 0).flatten(1).any(1) for axis in range(read.dim())]
    box = torch.ones((), dtype=torch.bool)
    for line in lines:
        box = box[..., None] & line
    if not torch.equal(box, read) or not any(bool(line.all()) for line in lines) or not bool(read.any()):
        return list(changes)
    result = [change.view(shape) for change in changes]
    for axis, line in enumerate(lines):
        last = torch.where(line, torch.arange(len(line)), line.byte().argmax()).cummax(0).values
        result = [change.index_select(axis, last) for change in result]
    return [change.reshape(changes[0].shape) for change in result]


def _multiply(weight: Tensor, parts: list[Part]) -> None:
    """Multiply parts of a weight and subtract from them, each element once."""
    whole = [part for part in parts if prod(part[0].size) == weight.numel()]
    if len(parts) > 1 and not whole:
        factors, shifts = torch.ones_like(weight), torch.zeros_like(weight)
        for view, read, written, shift in parts:
            view.of(factors).copy_(read * written)
            view.of(shifts).copy_(shift.expand(view.size))
        weight.mul_(factors).sub_(shifts)
        return
    view, *factors, shift = (whole or parts)[0]  # uses that share elements ask for the same change of them
    part = view.of(weight)
    for factor in factors:
        if bool((factor != 1).any()):
            part.mul_(factor)
    if bool((shift != 0).any()):
        part.sub_(shift)


def _biases(plan: FoldPlan, edit: "Edit") -> None:
    """`b <- (b + W t_in - t_out) / s_out`, with the weight as it was."""
    relations, at = plan.relations, plan.at
    changes: dict[Place, tuple[int, Tensor, Tensor]] = {}
    for product, inputs in relations.inputs.items():
        place = relations.trace.biases.get(product)
        if product.adds or (place is None and product not in plan.new_biases):
            continue
        writes, view = relations.outputs[product], product.view
        shift = at.shift[inputs].view(view.size[:2])
        delta = torch.zeros(view.outputs, dtype=torch.float64)
        if bool((shift != 0).any()):
            delta = torch.einsum("gkrn,gk->gn", view.of(parameter(edit.model, view.parameter)), shift).flatten()
        place, length = plan.new_biases[product] if place is None else (place, relations.trace.sizes[place.parameter])
        scale, written = at.scale[writes], at.written[writes]
        if bool((delta != 0).any() | (scale != 1).any() | (at.shift[writes] != 0).any() | (written != 1).any()):
            changes[place] = length, written / scale, (written * delta - at.shift[writes]) / scale
        elif product in plan.new_biases:
            changes[place] = length, torch.ones_like(scale), torch.zeros_like(scale)
    for place, (length, factor, summand) in changes.items():
        edit.change(place.parameter, lambda b, p=place, f=factor, a=summand: p.of(b).mul_(f).add_(a), length)


def _gains(source: Source, plan: FoldPlan, edit: "Edit") -> None:
    """A parameter per channel: `gain <- gain * s_in / s_out`."""
    relations, scale = plan.relations, plan.at.scale
    assert source.gains is not None
    table, _ = next(relations.trace.by_code(source.gains.double()))
    factor = scale[relations.scaled[source]] / scale[source.codes]
    index = (source.gains - table.base).long()
    if bool((factor != 1).any()):
        edit.change(table.name, lambda gain: gain.view(-1).__setitem__(index, gain.view(-1)[index] * factor))


class Edit:
    """Changes to parameters, collected and then carried out in float64."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.changes: dict[str, list[Callable[[Tensor], object]]] = {}
        self.lengths: dict[str, int] = {}

    def change(self, name: str, how: Callable[[Tensor], object], length: int = 0) -> None:
        """Note a change of a parameter in place; `length` is that of a bias to be made."""
        self.changes.setdefault(name, []).append(how)
        self.lengths[name] = max(length, self.lengths.get(name, 0))

    def write(self) -> None:
        """Carry out the changes."""
        for name, changes in self.changes.items():
            owner, _, key = name.rpartition(".")
            module = self.model.get_submodule(owner)
            tensor = getattr(module, key)
            value = (
                torch.zeros(self.lengths[name], dtype=torch.float64) if tensor is None else parameter(self.model, name)
            )
            for change in changes:
                change(value)
            if tensor is not None:
                tensor.copy_(value)
                module._non_persistent_buffers_set.discard(key)  # its values are not those that the constructor makes
                continue
            weight = next(p for k, p in module.named_parameters(recurse=False) if "weight" in k)
            setattr(module, key, nn.Parameter(value.to(weight.device, weight.dtype), weight.requires_grad))
            if isinstance(module, nn.MultiheadAttention) and module.out_proj.bias is None:
                module.out_proj.bias = nn.Parameter(weight.new_zeros(module.embed_dim), weight.requires_grad)


def _replace(model: nn.Module, plan: FoldPlan, node: NormNode, action: str) -> nn.Module:
    """Put the rest of a norm in its place."""
    old, channel_dim = model.get_submodule(node.name), plan.relations.trace.norms[node.name].channel_dim
    like = next((t for t in [*old.parameters(), *old.buffers()] if t.dtype.is_floating_point), None)
    like = next(model.parameters()) if like is None else like
    if action in GONE:
        new: nn.Module = nn.Identity()
    elif action == "gain folded":
        new = _plain(copy.deepcopy(node.rest), channel_dim).to(like.device)
    else:
        gain, shift = plan.affine(node)
        weight = None if action == "add" else gain.to(like)
        new = Affine(weight, shift.to(like) if bool((shift != 0).any()) else None, channel_dim)
    return put(model, node.name, new.train(old.training))


def _plain(rest: nn.Module, channel_dim: int) -> nn.Module:
    """PyTorch's own version of a norm without parameters where there is one."""
    if channel_dim == -1 and type(rest) is LayerNorm:
        return nn.LayerNorm(rest.dim, rest.eps, elementwise_affine=False)
    if channel_dim == -1 and type(rest) is RMSNorm and rest.eps_at == "inside":
        return nn.RMSNorm(rest.dim, rest.eps, elementwise_affine=False)
    return rest if channel_dim == -1 else channels_first(rest)
