"""Rewrite a model in new coordinates: weights, biases, tables, the rest of each norm."""

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from math import prod

import torch
from torch import Tensor, nn

from normkit.fold.float64 import on_cpu
from normkit.fold.plan import FoldPlan
from normkit.fold.relations import NormNode, parameter
from normkit.fold.report import GONE
from normkit.fold.trace import Product, Source, View
from normkit.models.affine import Affine, Identity
from normkit.models.convert import put_everywhere
from normkit.models.fastpath import leave_fast_path
from normkit.models.hooks import channels_first, take_hooks
from normkit.models.masks import remove_routes
from normkit.models.model_changes import save_buffer
from normkit.norms import LayerNorm, Norm, RMSNorm

Scaling = tuple[View, Tensor, Tensor, Tensor]  # a view, its factors by input and by output, what is subtracted


@torch.no_grad()
@on_cpu()
def rewrite(model: nn.Module, plan: FoldPlan) -> nn.Module:
    """Carry out a plan on a model in place, with arithmetic in float64."""
    _biases(model, plan)  # first: they need the weights as they were
    _weights(model, plan)
    for name, outcome in plan.outcomes.items():
        if outcome.action != "kept":
            model = _norm(model, plan, plan.relations.norms[name], outcome.action)
    leave_fast_path(model)
    if not any(isinstance(module, Norm) for module in model.modules()):
        remove_routes(model)
    return model


def change(model: nn.Module, name: str, how: Callable[[Tensor], object]) -> None:
    """Change a parameter or buffer in place: `how` changes its values in float64."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    value = parameter(model, name)
    how(value)
    getattr(module, key).copy_(value)
    save_buffer(module, key)


def largest_factor(plan: FoldPlan) -> float:
    """The largest number that an element of a weight is multiplied by."""
    factors = [_factors(plan, product) for product in plan.relations.inputs if product.view.inputs]
    return max((float((read.abs().amax(1) * written.abs().amax(3)).max()) for read, written in factors), default=1.0)


def _factors(plan: FoldPlan, product: Product) -> tuple[Tensor, Tensor]:
    """The factors of a weight by input and by output; their product is `[groups, in, 1, out]`."""
    groups, inputs, _, outputs = product.view.size
    writes = plan.relations.outputs[product]
    read = plan.at.scale[plan.relations.inputs[product]].view(groups, inputs, 1, 1)
    return read, (plan.at.written[writes] / plan.at.scale[writes]).view(groups, 1, 1, outputs)


def _weights(model: nn.Module, plan: FoldPlan) -> None:
    """`W <- diag(1 / s_out) W diag(s_in)`; a table `E <- (E - t) / s`."""
    changed: dict[str, list[Scaling]] = defaultdict(list)
    for product in plan.relations.inputs:
        read, written = _factors(plan, product)
        shift = torch.zeros_like(written)
        if product.takes_shift:
            nodes = plan.relations.outputs[product]
            shift = (plan.at.shift[nodes] / plan.at.scale[nodes]).view(written.shape)
        if product.kind == "table":
            shape, table = parameter(model, product.view.parameter).shape, plan.relations.trace.sources[product]
            written, shift = _of_longer_inputs(table, shape, written, shift)
        if bool((read != 1).any() | (written != 1).any() | (shift != 0).any()):
            changed[product.view.parameter].append((product.view, read, written, shift))
    for name, parts in changed.items():
        change(model, name, partial(_multiply, parts=parts))


def _of_longer_inputs(table: Source, shape: torch.Size, *changes: Tensor) -> list[Tensor]:
    """Change rows of a table that only longer inputs read as the rows before them."""
    if len(shape) < 2:
        return list(changes)
    read = torch.zeros(table.size, dtype=torch.bool)
    for codes in table.reads.values():
        read[(codes - table.base).long()] = True
    read = read.view(shape)
    lines = [read.movedim(axis, 0).flatten(1).any(1) for axis in range(read.dim())]
    if not any(bool(line.all()) for line in lines) or not bool(read.any()):
        return list(changes)
    result = [change.view(shape) for change in changes]
    for axis in (axis for axis, line in enumerate(lines) if not bool(line.all())):
        place = torch.arange(shape[axis]).view(-1, *[1] * (len(shape) - 1 - axis))
        last = torch.where(read, place, read.byte().argmax(axis, keepdim=True)).cummax(axis).values
        *result, read = (each.gather(axis, last) for each in (*result, read))
    return [change.reshape(changes[0].shape) for change in result]


def _multiply(weight: Tensor, parts: list[Scaling]) -> None:
    """Multiply parts of a weight and subtract from them, each element once."""
    whole = [part for part in parts if prod(part[0].size) == weight.numel()]
    if whole or len(parts) == 1:
        view, read, written, shift = (whole or parts)[0]  # uses that share elements ask for the same change of them
        view.of(weight).mul_(read).mul_(written).sub_(shift)
        return
    factors, shifts = torch.ones_like(weight), torch.zeros_like(weight)
    for view, read, written, shift in parts:
        view.of(factors).copy_(read * written)
        view.of(shifts).copy_(shift.expand(view.size))
    weight.mul_(factors).sub_(shifts)


def _biases(model: nn.Module, plan: FoldPlan) -> None:
    """`b <- (b + W t_in - t_out) / s_out`."""
    relations, at = plan.relations, plan.at
    changes: dict[View, tuple[Tensor, Tensor]] = {}
    for product, inputs in relations.inputs.items():
        bias = relations.trace.biases.get(product)
        if product in plan.new_biases:
            bias, length = plan.new_biases[product]
            _make_bias(model, bias.parameter, length)
        if bias is None:
            continue
        writes, view = relations.outputs[product], product.view
        delta = torch.zeros(view.outputs, dtype=torch.float64)
        if bool((at.shift[inputs] != 0).any()):
            weight = view.of(parameter(model, view.parameter))
            delta = torch.einsum("gkrn,gk->gn", weight, at.shift[inputs].view(view.size[:2])).flatten()
        scale, written = at.scale[writes], at.written[writes]
        changes[bias] = written / scale, (written * delta - at.shift[writes]) / scale
    for bias, (factor, summand) in changes.items():
        if bool((factor != 1).any() | (summand != 0).any()):
            change(model, bias.parameter, lambda b, of=bias.of, f=factor, a=summand: of(b).mul_(f).add_(a))


def _make_bias(model: nn.Module, name: str, length: int) -> None:
    """Give a layer a bias of zeros unless it has one."""
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    if getattr(module, key) is not None:
        return
    weight = next(p for k, p in module.named_parameters(recurse=False) if "weight" in k)
    setattr(module, key, nn.Parameter(weight.new_zeros(length), weight.requires_grad))
    if isinstance(module, nn.MultiheadAttention) and module.out_proj.bias is None:
        module.out_proj.bias = nn.Parameter(weight.new_zeros(module.embed_dim), weight.requires_grad)


def _norm(model: nn.Module, plan: FoldPlan, node: NormNode, action: str) -> nn.Module:
    """Change the gain and bias of a norm, or put what is left of it in its place."""
    if node.name in plan.relations.trace.calls:
        _norm_call(model, plan, node, action)
        return model
    old, channel_dim = model.get_submodule(node.name), plan.relations.trace.norms[node.name].channel_dim
    gain, shift = plan.affine(node)
    if action == "gain changed":
        for own, value in ((old.weight, gain), (getattr(old, "bias", None), shift)):
            if isinstance(own, Tensor):
                own.copy_(value)
        return model
    tensors = [*old.parameters(), *old.buffers(), *model.parameters()]
    like = next(t for t in tensors if t.dtype.is_floating_point)
    if action in GONE:
        new: nn.Module = Identity() if node.name in plan.relations.trace.masked else nn.Identity()
        if plan.relations.trace.keep_weights:
            new.register_buffer("weight", like.new_empty(0), persistent=False)
    elif action == "gain folded":
        new = _without_parameters(copy.deepcopy(node.rest), channel_dim).to(like)
        if isinstance(new, Norm) and isinstance(old, Norm):
            take_hooks(new, old)  # which pass the mask of a call
    else:
        weight = None if action == "add" else gain.to(like)
        new = Affine(weight, shift.to(like) if bool((shift != 0).any()) else None, channel_dim)
        new.requires_grad_(any(parameter.requires_grad for parameter in old.parameters()))
    return put_everywhere(model, node.name, new.train(old.training))


def _norm_call(model: nn.Module, plan: FoldPlan, node: NormNode, action: str) -> None:
    """Let a norm that a forward calls as a function compute what is left of it."""
    call, (gain, shift) = plan.relations.trace.calls[node.name], plan.affine(node)
    if action in GONE:
        gain, shift = torch.ones_like(gain), torch.zeros_like(shift)
    values = torch.zeros_like(gain), torch.full_like(gain, 1 - call.eps), gain, shift
    for name, value in zip(call.tensors, values, strict=True):
        change(model, name, lambda t, value=value: t.copy_(value))


def _without_parameters(rest: nn.Module, channel_dim: int) -> nn.Module:
    """PyTorch's own version of a norm without parameters where there is one."""
    if channel_dim == -1 and type(rest) is LayerNorm:
        return nn.LayerNorm(rest.dim, rest.eps, elementwise_affine=False)
    if channel_dim == -1 and type(rest) is RMSNorm and rest.eps_at == "inside" and rest.groups == 1:
        return nn.RMSNorm(rest.dim, rest.eps, elementwise_affine=False)
    return rest if channel_dim == -1 else channels_first(rest)
