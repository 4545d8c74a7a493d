"""Trace a model: follow every channel from where it is written to all that reads it.

Each followed tensor has a *shadow* of the same shape that holds the origin of every element: a code for "channel 5 of
norm 3", ZERO for padding, FOREIGN for anything else. Operations that only move data (views, transposes, slices, rolls,
concatenations, padding) are applied to the shadow as well, so it stays correct in any layout. Where a tensor meets a
weight in a matrix product, the shadow gives the channel that each element of the weight multiplies. Any other operation
is a reader that folding has to respect. There is no table of models and no assumption about axes.

Most shadows vary along one axis only. They are kept as expanded tensors, which take no memory and no time.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from normkit.fold.float64 import on_cpu
from normkit.fold.trace import (
    FOREIGN,
    ZERO,
    Product,
    Reader,
    Rowless,
    Source,
    Trace,
    View,
    channel_pairs,
    everywhere,
    joined,
)
from normkit.fold.trace_rules import MOVE_RULES, RULES
from normkit.models.invoke import Call
from normkit.models.lazy import memory

aten = torch.ops.aten

MOVES = {  # operations that put elements elsewhere and compute nothing
    aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.expand, aten.permute, aten.transpose, aten.t,
    aten.unsqueeze, aten.squeeze, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.unbind, aten.cat,
    aten.stack, aten.roll, aten.flip, aten.clone, aten.alias, aten.detach, aten.lift_fresh, aten.repeat, aten.index,
    aten.index_select, aten.gather, aten.unfold, aten.im2col, aten.pixel_unshuffle, aten.pixel_shuffle,
    aten.constant_pad_nd, aten._to_copy, aten.reflection_pad1d, aten.reflection_pad2d, aten.replication_pad1d,
    aten.replication_pad2d, aten.reflection_pad3d, aten.replication_pad3d, aten.channel_shuffle, aten.slice_scatter,
    aten.select_scatter,
}  # fmt: skip
SAME_ELEMENTS = {aten.clone, aten.alias, aten.detach, aten.lift_fresh, aten._to_copy}
SHAPES_ONLY = {  # operations that read a tensor's shape and type, not its numbers
    aten.empty_like, aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones, aten.new_empty,
    aten.new_full, aten.rand_like, aten.randn_like, aten.is_same_size, aten.sym_size, aten.sym_numel, aten.sym_stride,
}  # fmt: skip
SIMPLER = {  # operations in terms of those that have a rule
    aten.neg: lambda x: x * -1,
    aten.lerp: lambda x, end, weight: x + (end - x) * weight,
    aten.addcmul: lambda x, a, b, value=1: x + a * b * value,
}
ZEROS = {aten.zeros, aten.zeros_like, aten.new_zeros}


class Tracer(TorchDispatchMode):
    """Follows one forward. Use `tracing`, which also watches the modules."""

    def __init__(self, trace: Trace, model: nn.Module):
        super().__init__()
        self.trace = trace
        self.shadows: Any = WeakIdKeyDictionary()
        self.stack: list[str] = []
        self.inside_norm = 0
        self.gathered: set[Source] = set()  # sums of rows that are added one after the other (experts)
        known = [t for t in [*model.parameters(), *model.buffers()] if id(t) in trace.names and t.numel()]
        self.storages = {memory(t): trace.names[id(t)] for t in known}
        self.tables = self._tables(model)

    # -- shadows ------------------------------------------------------------------------------------------------------

    def shadow(self, tensor: Tensor) -> Tensor | None:
        """The shadow of a tensor; None where nothing in it is followed."""
        if tensor in self.shadows:
            return self.shadows[tensor]
        if id(tensor) in self.tables:
            name, size = self.trace.names[id(tensor)], tensor.numel()
            table = Product(View.row(name, size), "", "table")
            return self.trace.source(table, "table", name, size, table).codes.double().view(tensor.shape)
        return None

    def origins(self, tensor: Tensor) -> Tensor:
        """The shadow of a tensor, FOREIGN everywhere if it is not followed."""
        shadow = self.shadow(tensor)
        return everywhere(FOREIGN, tensor.shape) if shadow is None else shadow

    def mark(self, tensor: Tensor, source: Source, *dims: int) -> None:
        """Let an axis of a tensor hold the channels of a source, or several axes together."""
        shape = [1] * tensor.dim()
        for dim in dims:
            shape[dim] = tensor.shape[dim]
        self.shadows[tensor] = source.codes.double().view(shape).expand(tensor.shape)

    def note_reader(self, tensor: Tensor, by: Reader) -> None:
        """Note that `by` reads what is followed in a tensor."""
        for source, codes in self.trace.by_code(self.origins(tensor)):
            source.note_reader(by, codes)

    def note_weight_reader(self, tensor: Tensor, by: str) -> None:
        """Note that `by`, which is no product, reads a tensor if that is a weight."""
        if (parameter := self._parameter(tensor)) is not None:
            self.trace.weight_consumers[parameter].add(by)

    # -- modules ------------------------------------------------------------------------------------------------------

    @on_cpu()
    def enter(self, name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Pre-hook of a module: a norm is about to read its input."""
        self.stack.append(name)
        if name in self.trace.norms:
            x = args[0] if args else next(iter(kwargs.values()), None)
            if len(args) != 1 or kwargs:
                self.trace.masked.add(name)
            if self.inside_norm == 0 and isinstance(x, Tensor):
                pairs = channel_pairs(self.origins(x), self.trace.norms[name].channel_dim)
                self.trace.inputs[name] = joined(self.trace.inputs.get(name), pairs)
                self.note_reader(x, f"norm {name}")
            self.inside_norm += 1  # its own operations are not traced

    def leave(self, name: str, module: nn.Module, args: tuple, out: Any) -> Any:
        """Hook of a module: a norm has written its output."""
        self.stack.pop()
        if name in self.trace.norms:
            out = out.detach() if any(out is x for x in args) else out  # not its own input
            self.inside_norm -= 1
            if self.inside_norm == 0 and isinstance(out, Tensor) and out.numel():
                dim = self.trace.norms[name].channel_dim
                self.mark(out, self.trace.source(("norm", name), "norm", name, out.shape[dim]), dim)
        return out

    @property
    def module(self) -> str:
        """The module whose forward runs."""
        return self.stack[-1] if self.stack else ""

    # -- operations ---------------------------------------------------------------------------------------------------

    @on_cpu()
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket in SIMPLER and "out" not in kwargs:
            with self:
                return SIMPLER[func.overloadpacket](*args, **kwargs)
        if func.overloadpacket is aten.as_strided_:
            self.stride_before = args[0].stride()
        out = func(*args, **kwargs)
        if self.inside_norm:
            return out
        if func.overloadpacket is aten._local_scalar_dense and self.module not in self.trace.norms:
            self.trace.deciding.add(self.module)
        packet, name, dtype = func.overloadpacket, str(func.overloadpacket), kwargs.get("dtype") or torch.float
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if packet in ZEROS and out.dim() > 1 and out.dtype.is_floating_point:
            self.shadows[out] = everywhere(ZERO, out.shape)
        if packet in SHAPES_ONLY:
            return out
        tensors = [t for t in (*given, *tree_leaves(out)) if isinstance(t, Tensor)]
        place = (name, self.module, _place())
        if all(t.numel() for t in tensors):
            self.trace.with_rows.add(place)
        elif self.trace.is_example:  # in another call it may have rows
            for tensor in given:
                self.note_reader(tensor, by := Rowless(name, place))
                if (parameter := self._parameter(tensor)) is not None:
                    self.trace.rowless[parameter].add(by)
        if packet in MOVES and "out" not in kwargs and func is not aten.view.dtype and dtype.is_floating_point:
            rule = MOVE_RULES.get(packet)
            if any(self._followed(t) for t in given) and not (rule and rule(self, packet, args, out)):
                self._move(func, args, kwargs, out)
            storages = {memory(t) for t in tree_leaves(out) if isinstance(t, Tensor)}
            for tensor in (t for t in given if not self._followed(t) and storages - {memory(t)}):
                self.note_weight_reader(tensor, name)  # a copy of a weight will not change along with it
            return out
        if any(not t.numel() for t in given):  # an expert without rows: it reads, writes and adds nothing
            if isinstance(out, Tensor) and out.shape == given[0].shape and self._followed(given[0]):
                self.shadows[out] = self.origins(given[0])
            return out
        if (rule := RULES.get(packet)) and rule(self, packet, args, kwargs, out):
            return out
        for tensor in given:  # no rule: the operation reads its arguments, and its result is not followed
            self.note_reader(tensor, name)
            self.note_weight_reader(tensor, name)
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                for tensor in (t for t in tree_leaves(value) if isinstance(t, Tensor)):
                    self._forget(tensor)
        return out

    def _followed(self, tensor: Tensor) -> bool:
        return tensor in self.shadows or id(tensor) in self.tables

    def _move(self, func: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        def stand_in(t: Any) -> Any:
            if not isinstance(t, Tensor):
                return t
            return self.origins(t) if t.dtype.is_floating_point or t.is_complex() else t.cpu()

        packet, args, kwargs = func.overloadpacket, tree_map(stand_in, args), tree_map(stand_in, kwargs)
        if packet in SAME_ELEMENTS:
            moved: Any = args[0]
        elif packet in (aten.view, aten._unsafe_view, aten._reshape_alias):
            moved = args[0].reshape(args[1])
        elif packet is aten.roll and all(args[0].stride(axis) == 0 for axis in (args[2] if len(args) > 2 else ())):
            moved = args[0] if len(args) > 2 else func(*args, **kwargs)
        else:
            if packet is aten.constant_pad_nd and len(args) > 2 and args[2] != 0:
                args = (*args[:2], FOREIGN)
            moved = func(*args, **kwargs)
        self.shadows.update(zip(tree_leaves(out), tree_leaves(moved), strict=True))

    def _forget(self, written: Tensor) -> None:
        storage = memory(written)
        for tensor in [t for t in list(self.shadows.keys()) if memory(t) == storage]:
            if tensor is not written:
                self.note_reader(tensor, "an operation in place")
            del self.shadows[tensor]

    # -- weights ------------------------------------------------------------------------------------------------------

    def _parameter(self, tensor: Any) -> str | None:
        """The name of the parameter that a tensor is, or is a view of."""
        return self.storages.get(memory(tensor)) if isinstance(tensor, Tensor) and tensor.numel() else None

    def bias(self, tensor: Any, length: int) -> View | None:
        """The part of a parameter that a bias is."""
        parameter = self._parameter(tensor)
        if parameter is None or tensor.dim() != 1 or tensor.stride(0) != 1 or tensor.numel() != length:
            return None
        return View.row(parameter, length, tensor.storage_offset())

    def product(self, kind: str, part: Tensor, bias: Any, x: Tensor | None, out: Tensor, *dims: int) -> bool:
        """Note a product with part of a weight; False if `part` is of none.

        It is `[groups, in, positions, out]`. `x` is the shadow of the channels that it reads, `[rows, in]`; `out` has
        its channels at `dims`.
        """
        if (parameter := self._parameter(part)) is None or out.is_complex():
            return False
        view = View.at(parameter, part)
        added = None if bias is None else self.bias(bias, view.outputs)
        if bias is not None and added is None:
            return False
        product = Product(view, self.module, kind)
        if added is not None:
            self.trace.biases[product] = added
        if x is not None:
            pairs = channel_pairs(x, 1)
            for source, own in self.trace.by_code(pairs[:, 0]):
                source.note_reader(product, own)
            self.trace.slots[product] = joined(self.trace.slots.get(product), pairs)
        self.mark(out, self.trace.source(product, "product", view.parameter, view.outputs, product), *dims)
        return True

    def _tables(self, model: nn.Module) -> set[int]:
        """Parameters and buffers that may be summands or factors, not the weight of a layer."""
        tensors = []
        for module in model.modules():
            looked_up = isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward
            if not looked_up and not isinstance(module, nn.Linear | nn.modules.conv._ConvNd | nn.MultiheadAttention):
                tensors += [*module._parameters.values(), *module._buffers.values()]
        dense = (t for t in tensors if id(t) in self.trace.names and t.layout is torch.strided)
        return {id(t) for t in dense if t.dtype.is_floating_point and 1 < t.numel() <= 1 << 20}


def _place() -> int:
    """The place in the model's code that runs, the same in every call and every round of a loop."""
    frame, place = sys._getframe(2), 0
    while frame is not None and frame.f_code is not Call.of.__code__:
        if not frame.f_globals.get("__name__", "").startswith(("torch.", "normkit.models.", "normkit.fold.")):
            place = hash((place, id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return place


@contextmanager
def tracing(trace: Trace, model: nn.Module) -> Iterator[Tracer]:
    """Follow the forwards of `model`, a copy with each parameter in its own storage."""
    tracer = Tracer(trace, model)
    with ExitStack() as hooks, torch.no_grad(), tracer:
        for name, module in model.named_modules():
            enter, leave = partial(tracer.enter, name), partial(tracer.leave, name)
            hooks.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
            hooks.enter_context(module.register_forward_hook(leave))
        yield tracer
