"""A model whose inputs and outputs are tensors alone, and the axes that its inputs leave open."""

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from normkit.models.invoke import Call, Pick, tensors


class TensorModel(nn.Module):
    """A model whose inputs and outputs are tensors only, as exporters need it."""

    def __init__(self, model: nn.Module, call: Call, outputs: Pick | None = None):
        super().__init__()
        self.model, self.call, self.outputs = model, call, outputs
        self.given: tuple[Tensor, ...] = tuple(leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor))
        known = list(inspect.signature(model.forward).parameters)
        known += [f"input_{i}" for i in range(len(known), len(call.args))]  # of *args
        paths = tensors((dict(zip(known, call.args, strict=False)), call.kwargs))
        self.names = [path.split(".", 1)[1].replace(".", "_") for path in paths]
        self.results: tuple[str, ...] = ()  # names of the outputs

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Return the tensor of the output, or all of them in order."""
        found = self.all_outputs(*inputs)
        return found if len(found) > 1 else next(iter(found))

    def all_outputs(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors of the output, in order."""
        left = iter(inputs)
        found = picked(tree_map_only(Tensor, lambda _: next(left), self.call).of(self.model), self.outputs)
        return tuple(found.values())

    def feed(self, given: Sequence[Tensor]) -> dict[str, Any]:
        """Return inputs as arrays, by name."""
        return {name: t.detach().numpy() for name, t in zip(self.names, given, strict=True)}


def picked(output: Any, outputs: Pick | None) -> dict[str, Tensor]:
    """Return the tensors of an output that are exported, by name; a ValueError if there are none."""
    names = {id(tensor): path for path, tensor in tensors(output).items()} if outputs else {}
    found = dict[str, Tensor]()
    for path, tensor in tensors(output, outputs).items():
        name = names.get(id(tensor), path).replace(".", "_")  # that of the model, if it is picked as it is
        name = name if name[:1].isalpha() else f"output_{name}".rstrip("_")
        found[f"{name}_{len(found)}" if name in found else name] = tensor
    if not found:
        where = f"the model output ({type(output).__name__})" if outputs is None else "what outputs= picks"
        raise ValueError(f"export() found no tensor in {where}; pass outputs= that picks some")
    return found


def open_axes(given: tuple[Tensor, ...], tokens: bool = True, batch: bool = True) -> Any:
    """Return dynamic shapes: the batch, and with `tokens` the axes of tokens if the model allows it.

    The batch is the first axis of all tensors with the most common length; None if it is below 2. Without `batch`
    PyTorch finds which of the first two axes are open, as of models that have the time first.
    """
    if not batch:
        auto = torch.export.Dim.AUTO
        return {"inputs": tuple({i: auto for i in range(min(t.dim(), 2)) if t.shape[i] > 1} or None for t in given)}
    sizes = [t.shape[0] for t in given if t.dim()]
    size = max(set(sizes), key=sizes.count) if sizes else 0
    if size < 2:
        return None
    found = []
    for t in given:
        axes: dict[int, Any] = {0: torch.export.Dim.DYNAMIC} if t.dim() and t.shape[0] == size else {}
        if tokens and t.dim() in (2, 3) and axes and t.shape[1] > 1 and (t.dim() == 3 or not t.is_floating_point()):
            axes[1] = torch.export.Dim.AUTO  # PyTorch fixes what the model fixes
        found.append(axes or None)
    return {"inputs": tuple(found)}


def resized(t: Tensor, axis: int, size: int) -> Tensor:
    """Cut a tensor, or repeat its last element, along an axis."""
    return t.index_select(axis, torch.arange(size, device=t.device).clamp(max=t.shape[axis] - 1))
