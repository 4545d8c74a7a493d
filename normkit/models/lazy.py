"""Weights that are read where an operation needs their numbers, and dropped after it.

A model of such weights runs in little memory, and none of them is changed by a copy of the model: copies share what
reads the numbers. Operations that only move or convert elements are deferred, so a weight that is made of several
tensors of a file (experts, say) is put together where it is used.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
SMALL = 1 << 16  # elements up to which a tensor is held: norms, biases
BLOCK = 1 << 20  # elements that are read at once where an operation can use a weight in parts: 8 MB in float64
AHEAD = 8  # blocks that a job may be ahead of the slowest
SAME = {aten.alias, aten.detach, aten.lift_fresh, aten.clone}
DEFERRED = SAME | {
    aten.view, aten._unsafe_view, aten.reshape, aten._reshape_alias, aten.expand, aten.permute, aten.transpose, aten.t,
    aten.unsqueeze, aten.squeeze, aten.select, aten.slice, aten.split, aten.split_with_sizes, aten.unbind, aten.cat,
    aten.stack, aten._to_copy, aten.as_strided,
}  # fmt: skip
ALL = slice(None)

T = TypeVar("T")
Read = Callable[[slice], Tensor]  # a range of rows, as a new tensor


class Lazy(Tensor):
    """A tensor of known shape and type, whose rows `read` returns.

    Args:
        like: Tensor on meta with its shape, strides and type. Views of a tensor share the storage of its `like`.
        read: Reads a range of rows, along the first axis.
        device: Device of the numbers.
        in_parts: A few rows are read in less time than all.
        transposed: The matrix that this one is the transpose of.
        leaves: The tensors that this one is made of; itself by default.

    Examples:
        >>> weight = Lazy(torch.empty(2, 3, device="meta"), lambda rows: torch.ones(2, 3)[rows])
        >>> (weight.t() @ torch.ones(2)).tolist()
        [2.0, 2.0, 2.0]
    """

    converts = True  # types, where that was deferred
    draws: torch.Generator | None = None  # products with weights that are not read, at random
    current = threading.local()  # the reads that the job of this thread shares
    like: Tensor
    read: Read
    in_parts: bool
    transposed: "Lazy | None"
    leaves: tuple["Lazy", ...]

    @staticmethod
    def __new__(
        cls, like: Tensor, read: Read, device: torch.device | str = "cpu", in_parts: bool = True,
        transposed: "Lazy | None" = None, leaves: tuple["Lazy", ...] = (),
    ) -> "Lazy":  # fmt: skip
        """Make a tensor that holds no numbers."""
        self = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), storage_offset=like.storage_offset(), dtype=like.dtype,
            device=torch.device(device),
        )  # fmt: skip
        self.like, self.read, self.in_parts, self.transposed = like, read, in_parts, transposed
        self.leaves = leaves or (self,)
        return self

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Lazy({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        memo[id(self)] = new = self.changed(self.read, self.in_parts)
        return new

    def changed(self, read: Read, in_parts: bool = True) -> Tensor:
        """A tensor of the same shape and type with other numbers, in a storage of its own."""
        new = Lazy(torch.empty_like(self.like), read, self.device, in_parts)
        return nn.Parameter(new, self.requires_grad) if isinstance(self, nn.Parameter) else new

    def numbers(self, rows: slice = ALL) -> Tensor:
        """Read the tensor, or a range of its rows; others may hold the same numbers."""
        shared = _shared() if rows != ALL else None
        return self.read(rows) if shared is None else shared.read(self.read, rows)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if packet in DEFERRED and func is not aten.view.dtype and all(isinstance(t, Lazy) for t in given):
            return _deferred(func, args, kwargs)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Lazy):
                raise RuntimeError(f"{func} changes a weight in place, which is read from elsewhere")
        if packet is aten.embedding:
            return _rows(args[0], args[1])
        if packet is aten.index and len(args[1]) == 1 and args[1][0].dtype is torch.int64:
            return _rows(args[0], args[1][0])
        if packet in (aten.mm, aten.addmm) and not kwargs and isinstance(args[-1], Lazy):
            x, weight = args[-2], args[-1].transposed
            if cls.draws is not None:
                return x.new_empty(len(x), args[-1].shape[1]).normal_(generator=cls.draws)
            if weight is not None and weight.in_parts and weight.numel() > BLOCK:
                x, out = numbers(x).T.contiguous(), x.new_empty(len(weight), len(x))
                for rows, part in blocks(weight):
                    torch.mm(part, x, out=out[rows])  # faster than with few rows on the left
                out = out.T.contiguous()
                return out if packet is aten.mm else out + args[0]
        args, kwargs = tree_map_only(Lazy, Lazy.numbers, (args, kwargs))
        return func(*args, **kwargs)  # pyright: ignore[reportCallIssue]


def blocks(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Ranges of rows of a tensor, and the numbers of each: of `BLOCK` elements in all."""
    if not tensor.dim() or (isinstance(tensor, Lazy) and not tensor.in_parts):
        yield ALL, numbers(tensor)
        return
    step = max(1, BLOCK // max(1, prod(tensor.shape[1:])))
    for start in range(0, len(tensor), step):
        rows = slice(start, min(start + step, len(tensor)))
        if (shared := _shared()) is not None:
            shared.advance()
        yield rows, tensor.numbers(rows) if isinstance(tensor, Lazy) else tensor.detach()[rows]


def numbers(tensor: Tensor) -> Tensor:
    """The numbers of a tensor, read if it is lazy."""
    return tensor.numbers() if isinstance(tensor, Lazy) else tensor.detach()


def memory(tensor: Tensor) -> int:
    """A number for a tensor's memory, the same for its views; sparse ones have none."""
    if isinstance(tensor, Lazy):
        return -tensor.like.untyped_storage()._cdata
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def is_large(tensor: Tensor) -> bool:
    """True for a weight that is worth reading only where it is used."""
    return tensor.numel() > SMALL and tensor.dtype.is_floating_point and tensor.layout is torch.strided


def widened(tensor: Tensor) -> Tensor:
    """A lazy copy of a tensor in float64."""
    like = torch.empty(tensor.shape, dtype=torch.float64, device="meta")
    if isinstance(tensor, Lazy):
        new = Lazy(like, lambda rows: in_float64(tensor.numbers(rows)), tensor.device, tensor.in_parts)
    else:
        held = tensor.detach()
        new = Lazy(like, lambda rows: held[rows].to(torch.float64, copy=True), tensor.device)
    return nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new


def in_float64(tensor: Tensor, out: Tensor | None = None) -> Tensor:
    """A tensor in float64, in `out` if given; 16 bits become 32 first, which is exact and faster."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.double() if out is None else out.resize_(tensor.shape).copy_(tensor)


@contextmanager
def without_reading() -> Iterator[None]:
    """Let products with lazy weights be random numbers, for a trace of what is computed from what."""
    Lazy.draws = torch.Generator().manual_seed(0)
    try:
        yield
    finally:
        Lazy.draws = None


class _Reads:
    """Blocks of weights that jobs in several threads read at about the same time."""

    def __init__(self):
        self.turn = threading.Condition()
        self.at: dict[int, int] = {}  # by thread: the number of blocks that it has begun
        self.kept: dict[tuple, tuple[int, Read, Future[Tensor]]] = {}

    def advance(self) -> None:
        """Begin the next block, when no other job is far behind."""
        me = threading.get_ident()
        with self.turn:
            self.at[me] += 1
            self.turn.notify_all()
            self.turn.wait_for(lambda: self.at[me] <= min(self.at.values()) + AHEAD)
            slowest = min(self.at.values())
            self.kept = {key: each for key, each in self.kept.items() if each[0] >= slowest}

    def read(self, read: Read, rows: slice) -> Tensor:
        """Read a block, or take what another job has read."""
        key = id(read), rows.start, rows.stop
        with self.turn:
            is_first = key not in self.kept
            *_, block = self.kept.setdefault(key, (self.at[threading.get_ident()], read, Future()))
        if is_first:
            try:
                block.set_result(read(rows))
            except BaseException as problem:
                block.set_exception(problem)
        return block.result()


def _shared() -> _Reads | None:
    return getattr(Lazy.current, "reads", None)


def side_by_side(jobs: Sequence[Callable[[], T]]) -> list[Future[T]]:
    """Run jobs in a thread each; blocks of lazy weights are read once for all of them.

    Examples:
        >>> [job.result() for job in side_by_side([lambda: 1, lambda: 2])]
        [1, 2]
    """
    shared, ready = _Reads(), threading.Barrier(len(jobs))

    def run(job: Callable[[], T]) -> T:
        Lazy.current.reads, me = shared, threading.get_ident()
        shared.at[me] = 0
        ready.wait()
        try:
            return job()
        finally:
            with shared.turn:
                del shared.at[me]
                shared.turn.notify_all()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [pool.submit(run, job) for job in jobs]


@contextmanager
def only_moving() -> Iterator[None]:
    """Read tensors without the conversions of types that were deferred."""
    Lazy.converts = False
    try:
        yield
    finally:
        Lazy.converts = True


def _rows(weight: Tensor, index: Tensor) -> Tensor:
    """The rows of a matrix or stack with these numbers."""
    if isinstance(index, Lazy):
        index = index.numbers()
    if not isinstance(weight, Lazy) or not weight.in_parts:
        return numbers(weight)[index]
    places, where = (index % len(weight)).unique(return_inverse=True)
    return torch.cat([weight.numbers(slice(k, k + 1)) for k in places.tolist()])[where] if len(places) else (
        weight.numbers(slice(0, 0))[where])  # fmt: skip


def _deferred(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of an operation that is done where it is used."""
    kwargs = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    like = func(*tree_map_only(Lazy, lambda t: t.like, args), **kwargs)
    packet, lazies = func.overloadpacket, [t for t in tree_leaves(args) if isinstance(t, Lazy)]
    of = lazies[0]
    leaves = tuple({id(leaf): leaf for t in lazies for leaf in t.leaves}.values())
    make = {"device": of.device, "leaves": leaves}

    def whole(rows: slice = ALL) -> Any:
        return func(*tree_map_only(Lazy, lambda t: t.numbers(rows), args), **kwargs)

    if not isinstance(like, Tensor):
        if packet is aten.unbind and (len(args) == 1 or args[1] == 0):
            return [Lazy(each, _one(of, k), in_parts=of.in_parts, **make) for k, each in enumerate(like)]
        return type(like)(Lazy(each, _part(whole, k), in_parts=False, **make) for k, each in enumerate(like))
    if packet in SAME:
        return Lazy(like, of.read, in_parts=of.in_parts, transposed=of.transposed, **make)
    if packet is aten._to_copy:
        return Lazy(
            like,
            lambda rows: of.numbers(rows).to(like.dtype) if Lazy.converts else of.numbers(rows),
            in_parts=of.in_parts, **make,
        )  # fmt: skip
    dims = {dim % of.dim() for dim in args[1:3]} if packet is aten.transpose else {0, 1} if packet is aten.t else set()
    if packet is aten.select and args[1] % of.dim() == 0:
        return Lazy(like, _one(of, args[2] % len(of)), in_parts=of.in_parts, **make)
    if packet is aten.stack and (len(args) == 1 or args[1] == 0):
        return Lazy(like, lambda rows: torch.stack([t.numbers() for t in lazies[rows]]), **make)
    if (packet is aten.cat and len(args) > 1 and args[1] % of.dim()) or (dims and 0 not in dims):
        return Lazy(like, whole, in_parts=all(t.in_parts for t in lazies), **make)
    swapped = of if dims and of.dim() == 2 else None
    return Lazy(like, lambda rows: _cut(whole(), rows), in_parts=False, transposed=swapped, **make)


def _one(of: Lazy, k: int) -> Read:
    return lambda rows: _cut(of.numbers(slice(k, k + 1))[0], rows)


def _part(whole: Callable[[], Any], k: int) -> Read:
    return lambda rows: _cut(whole()[k], rows)


def _cut(tensor: Tensor, rows: slice) -> Tensor:
    return tensor if rows == ALL else tensor[rows]
