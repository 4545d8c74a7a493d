"""Counts of operations, of the bytes that they touch, and of FLOPs, without a clock."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from normkit.kernels.cpu import arguments

SHAPED = {"view", "_unsafe_view", "expand", "unsqueeze", "squeeze", "t", "transpose", "permute"}
VIEWS = SHAPED | {"alias", "select", "slice", "unbind", "split", "split_with_sizes", "detach"}
FREE = VIEWS | {"empty", "empty_like", "new_empty", "lift_fresh", "promote_types"}
MOVERS = {"copy_", "_to_copy", "clone", "cat", "stack", "fill_", "zero_", "arange", "index_select", "index"}
FLOPS = {  # per element of x: additions, multiplications, comparisons and roots, one each; 1 for all others
    "native_layer_norm": 8,  # mean 1, variance 3, standardize 2, weight and bias 2
    "native_layer_norm_backward": 13,  # z 2, weight 1, two sums 3, dx 4, weight's and bias's gradients 3
    "batch_norm_update_stats": 4,  # mean 1, variance 3
    "native_batch_norm": 2,  # inference: x * a + b
    "native_batch_norm_backward": 9,  # two sums 4, dx 5
    "_weight_norm_interface_backward": 6,  # a sum 2, dx 4
    "linalg_vector_norm": 2, "addcmul": 2, "addcmul_": 2, "lerp": 3, "mv": 2,
}  # fmt: skip


class Counter(TorchDispatchMode):
    """Count operations, the bytes of their tensors, and FLOPs.

    Operations are ATen's, without views and allocations, and the C++ kernels.

    >>> import torch
    >>> x = torch.ones(3)
    >>> with Counter() as count:
    ...     _ = x.view(1, 3) * 2
    >>> count.operations, count.bytes, count.flops
    (1, 24, 3)
    """

    operations = bytes = flops = 0
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
        self.flops += kernel_flops(name, given) * given["x"].numel()

    def _touch(self, touched: object) -> list[Tensor]:
        tensors = [t for t in tree_leaves(touched) if isinstance(t, Tensor)]
        self.operations += 1
        self.bytes += sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())
        return tensors

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in FREE:
            touched = out if name.startswith("new_") or name.endswith("_like") else (args, kwargs, out)
            tensors = self._touch(touched)
            if touched is not out and name not in MOVERS:
                each = FLOPS.get(name, 1)
                if name == "native_batch_norm_backward" and out[0] is None:
                    each = 4  # the sums alone
                self.flops += each * max((t.numel() for t in tensors), default=0)
        return out


def read_again(name: str, given: dict[str, Any]) -> list[Tensor]:
    """Tensors that a C++ kernel reads twice: statistics unknown in advance come first."""
    if name not in ("train", "differentiate") or given["known_in_advance"]:
        return []
    return [given["x"]] if name == "train" else [given["x"], given["dy"]]


def kernel_flops(name: str, given: dict[str, Any]) -> int:
    """FLOPs per element of x of a C++ kernel with these arguments."""
    has = {key: value is not None for key, value in given.items()}
    if name == "row_forward":  # sum of squares, times the factor, weight and bias
        return 2 + 1 + has["weight"] + has["bias"]
    if name == "row_backward":  # sum of squares, sums of dy and dy z, g, its sum with z, dx
        return 2 + 4 * has["sums"] + has["weight"] + 2 + 3
    groups = bool(given["groups"])
    if name == "infer":
        return 2 + bool(given["center"]) + 3 * groups
    if name == "train":
        return 2 + 3 * bool(given["center"]) + 2 + 3 * groups
    if name == "differentiate":
        return 3 + 3 + 3 * bool(given["center"]) + 8 * groups
    mean = has.get("mean", False)
    if name == "column_forward":  # y, moments, layer-scale
        return has.get("y", False) * (2 + mean) + has["stat"] * (4 if given.get("center") else 2) + 3 * groups
    return has["sums"] * (3 + mean) + has["dx"] * (3 + 2 * mean + 5 * groups) + 3 * groups
