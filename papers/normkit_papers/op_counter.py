"""Counts of operations and of the bytes that they touch, without a clock."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normkit.kernels.cpu import arguments

FREE = {"_unsafe_view", "empty", "empty_like", "new_empty", "promote_types"}  # beside views


class Counter(TorchDispatchMode):
    """Count operations and the bytes of their tensors.

    Operations are ATen's, without views and allocations, and the C++ kernels.

    >>> import torch
    >>> x = torch.ones(3)
    >>> with Counter() as count:
    ...     _ = x.view(1, 3) * 2
    >>> count.operations, count.bytes
    (1, 24)
    """

    operations = bytes = 0
    counts_custom_kernels = True  # so the C++ kernels keep running

    def __enter__(self):
        arguments.observers.append(self._count_kernel)
        return super().__enter__()

    def __exit__(self, *raised):
        arguments.observers.remove(self._count_kernel)
        return super().__exit__(*raised)

    def _count_kernel(self, name: str, given: dict) -> None:
        self._touch(given)
        self.bytes += sum(t.nbytes for t in read_again(name, given))

    def _touch(self, touched: object) -> None:
        tensors = [t for t in tree_leaves(touched) if isinstance(t, Tensor)]
        self.operations += 1
        self.bytes += sum(t.nbytes for t in {id(t): t for t in tensors}.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not func.is_view and name not in FREE:
            self._touch(out if name.startswith("new_") or name.endswith("_like") else (args, kwargs, out))
        return out


def read_again(name: str, given: dict[str, Any]) -> list[Tensor]:
    """Tensors that a C++ kernel reads twice: statistics unknown in advance come first."""
    if name not in ("train", "differentiate") or given["known_in_advance"]:
        return []
    return [given["x"]] if name == "train" else [given["x"], given["dy"]]
