"""Rewrite a model in new coordinates: weights, biases, tables, the rest of each norm."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from normkit.fold.float64 import on_cpu
from normkit.fold.plan import FoldPlan
from normkit.fold.relations import NormNode, parameter
from normkit.fold.report import GONE, UNREPLACED
from normkit.fold.trace import Product, Source, View
from normkit.models.affine import Affine, Identity
from normkit.models.convert import put_everywhere
from normkit.models.fastpath import leave_fast_path
from normkit.models.hooks import channels_first, take_hooks
from normkit.models.lazy import Lazy, blocks
from normkit.models.masks import remove_routes
from normkit.models.model_changes import save_buffer
from normkit.norms import LayerNorm, Norm, RMSNorm

Change = Callable[[Tensor, slice], Tensor]  # the new numbers of some rows of a parameter, in float64


class Part(NamedTuple):
    """A change of part of a parameter: what it is multiplied by, by input and by output, and a summand.

    All are `[groups, in, 1, out]`, or broadcast to it.
    """

    view: View
    read: Tensor
    written: Tensor
    summand: Tensor


class Edit(NamedTuple):
    """A change of a parameter, `w * read * written + summand`, which broadcast to it."""

    read: Tensor
    written: Tensor
    summand: Tensor

    @property
    def changes(self) -> bool:
        """It changes a number."""
        read, written, summand = self
        return bool((read != 1).any() | (written != 1).any() | (summand != 0).any())

    def __call__(self, values: Tensor, rows: slice = slice(None), out: Tensor | None = None) -> Tensor:
        """The new numbers of some rows, from their numbers; `out` may be the tensor of these."""
        read, written, summand = (t[rows] if t.dim() and len(t) > 1 else t for t in self)
        factors = [factor for factor in (read, written) if bool((factor != 1).any())]
        summands = [summand] if bool((summand != 0).any()) else []
        if factors or summands:
            how, first = (torch.mul, factors.pop()) if factors else (torch.add, summands.pop())
            values = how(values, first, out=out)  # changed in place below
        for factor in factors:
            values.mul_(factor)
        return values.add_(summands.pop()) if summands else values


@torch.no_grad()
@on_cpu()
def rewrite(model: nn.Module, plan: FoldPlan) -> nn.Module:
    """Carry out a plan on a model in place, with arithmetic in float64."""
    for bias, length in plan.new_biases.values():
        _make_bias(model, bias.parameter, length)
    for name, edit in find_edits(model, plan).items():
        change(model, name, edit)
    for name, outcome in plan.outcomes.items():
        if outcome.action not in UNREPLACED and not plan.trace.keep_architecture:
            model = _replace(model, plan, plan.relations.norms[name], outcome.action)
    leave_fast_path(model)
    if not any(isinstance(module, Norm) for module in model.modules()):
        remove_routes(model)
    return model


@torch.no_grad()
def change(model: nn.Module, name: str, how: Change, in_parts: bool = True) -> None:
    """Change a parameter or buffer in place; one that is lazy is replaced wherever it is used.

    Args:
        model: The model to change.
        name: Name of the parameter or buffer.
        how: Its new numbers from its numbers, in float64, and the rows that these are.
        in_parts: The new numbers of a row depend on that row alone.
    """
    owner, _, key = name.rpartition(".")
    module = model.get_submodule(owner)
    tensor = getattr(module, key)
    if isinstance(tensor, Lazy):
        new = tensor.changed(lambda rows: how(tensor.numbers(rows), rows), in_parts and tensor.in_parts)
        if not in_parts:
            new = tensor.changed(lambda rows: how(tensor.numbers(), slice(None))[rows], False)
        for each in model.modules():
            each._parameters |= {k: new for k, p in each._parameters.items() if p is tensor}  # pyright: ignore[reportAttributeAccessIssue]
        return
    for rows, part in blocks(tensor) if in_parts else [(slice(None), tensor.detach())]:
        part.copy_(how(part.double().cpu(), rows))
    save_buffer(module, key)


def find_edits(model: nn.Module, plan: FoldPlan) -> dict[str, Edit]:
    """The changes of parameters and buffers by name; `model` is what they are to be made on."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for part in (*_weights(model, plan), *_biases(model, plan)):
        parts[part.view.parameter].append(part)
    edits = {name: _edit(_shape(model, name), own) for name, own in parts.items()}
    for name, outcome in plan.outcomes.items():
        replaced = outcome.action == "gain folded" and not plan.trace.keep_architecture
        if outcome.action in ("gain changed", "gain folded") and not replaced:
            node, prefix = plan.relations.norms[name], f"{name}." if name else ""
            gain, shift = plan.affine(node)
            values = {"weight": gain - node.offset} if node.takes_scale else {}
            values |= {"bias": shift} if node.takes_shift else {}
            zero, one = torch.zeros(1).double(), torch.ones(1).double()
            edits |= {prefix + key: Edit(zero, one, value) for key, value in values.items()}
    return {name: edit for name, edit in edits.items() if edit.changes}


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


def _weights(model: nn.Module, plan: FoldPlan) -> Iterator[Part]:
    """`W <- diag(1 / s_out) W diag(s_in)`; a table `E <- (E - t) / s`."""
    for product in plan.relations.inputs:
        name = product.view.parameter
        read, written = _factors(plan, product)
        shift = torch.zeros_like(written)
        if product.takes_shift:
            nodes = plan.relations.outputs[product]
            shift = (plan.at.shift[nodes] / plan.at.scale[nodes]).view(written.shape)
        if product.kind == "table":
            table = plan.relations.trace.sources[product]
            written, shift = _of_longer_inputs(table, _shape(model, name), written, shift)
        if bool((read != 1).any() | (written != 1).any() | (shift != 0).any()):
            yield Part(product.view, read, written, -shift)


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


def _edit(shape: torch.Size, parts: list[Part]) -> Edit:
    """The change of a parameter, from those of its parts; shared elements change alike."""
    whole = [part for part in parts if prod(part.view.size) == prod(shape)][:1]
    if whole and (axes := _axes(whole[0].view, shape, whole[0].view.offset)) is not None:
        return Edit(*(_placed(t, axes) for t in whole[0][1:]))
    row, slices = prod(shape[1:]), dict[int, list[Tensor]]()
    for part in () if whole else parts:
        axes = _axes(part.view, shape[1:], part.view.offset % row)
        if axes is None:
            break
        slices[part.view.offset // row] = [_placed(t, axes) for t in part[1:]]
    else:
        if slices:
            read, written, summand = zip(*slices.values(), strict=True)
            stacked = partial(_stacked, [*slices], shape[0])
            return Edit(stacked(read, 1.0), stacked(written, 1.0), stacked(summand, 0.0))
    read, summand = torch.ones(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for part in whole or parts:
        part.view.of(read).copy_((part.read * part.written).expand(part.view.size))
        part.view.of(summand).copy_(part.summand.expand(part.view.size))
    return Edit(read, torch.ones(()).double(), summand)


def _stacked(places: list[int], count: int, slices: tuple[Tensor, ...], default: float) -> Tensor:
    """Slices along a new first axis; `default` where there is none."""
    given = torch.stack(torch.broadcast_tensors(*slices))
    return given.new_full((count, *given.shape[1:]), default).index_copy_(0, torch.tensor(places), given)


def _axes(view: View, shape: torch.Size, offset: int) -> list[int] | None:
    """The axis of a view at each axis of a contiguous tensor that it covers; None if it is another part."""
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    found = {(n, step): axis for axis, (n, step) in enumerate(zip(view.size, view.stride, strict=True)) if n > 1}
    wanted = [(n, step) for n, step in zip(shape, strides, strict=True) if n > 1]
    if offset or prod(view.size) != prod(shape) or {*wanted} != {*found}:
        return None
    return [found.get((n, step), -1) for n, step in zip(shape, strides, strict=True)]


def _placed(tensor: Tensor, axes: list[int]) -> Tensor:
    """A tensor `[groups, in, positions, out]`, or one that broadcasts to it, with these axes."""
    if bool((tensor == tensor.flatten()[0]).all()):
        tensor = tensor.flatten()[:1].view(1, 1, 1, 1)
    rest = [axis for axis in range(4) if axis not in axes]
    order = [axis for axis in axes if axis >= 0]
    lengths = [tensor.shape[axis] if axis >= 0 else 1 for axis in axes]
    return tensor.permute(*order, *rest).reshape(lengths)


def _biases(model: nn.Module, plan: FoldPlan) -> Iterator[Part]:
    """`b <- (b + W t_in - t_out) / s_out`."""
    relations, at = plan.relations, plan.at
    changes: dict[View, tuple[Tensor, Tensor]] = {}
    for product, inputs in relations.inputs.items():
        bias = relations.trace.biases.get(product)
        if product in plan.new_biases:
            bias, _ = plan.new_biases[product]
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
            by_output = factor.view(1, 1, 1, -1), summand.view(1, 1, 1, -1)
            yield Part(bias, torch.ones_like(by_output[0][..., :1]), *by_output)


def _shape(model: nn.Module, name: str) -> torch.Size:
    owner, _, key = name.rpartition(".")
    return getattr(model.get_submodule(owner), key).shape


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


def _replace(model: nn.Module, plan: FoldPlan, node: NormNode, action: str) -> nn.Module:
    """Put what is left of a norm in its place."""
    old, channel_dim = model.get_submodule(node.name), plan.relations.trace.norms[node.name].channel_dim
    gain, shift = plan.affine(node)
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


def _without_parameters(rest: nn.Module, channel_dim: int) -> nn.Module:
    """PyTorch's own version of a norm without parameters where there is one."""
    if channel_dim == -1 and type(rest) is LayerNorm:
        return nn.LayerNorm(rest.dim, rest.eps, elementwise_affine=False)
    if channel_dim == -1 and type(rest) is RMSNorm and rest.eps_at == "inside" and rest.groups == 1:
        return nn.RMSNorm(rest.dim, rest.eps, elementwise_affine=False)
    return rest if channel_dim == -1 else channels_first(rest)
