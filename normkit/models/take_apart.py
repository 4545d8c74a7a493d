"""Take apart modules of a norm and an activation or a gate, and weights with parametrizations.

Such as timm's `BatchNormAct2d`, the `RMSNormGated` of Mamba 2, and PyTorch's `weight_norm`.
"""

import copy
import itertools
from collections import OrderedDict
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from normkit.models.hooks import copy_without_hooks, take_hooks
from normkit.models.third_party import example_of, is_named_norm, read_eps, read_norm, real_tensors, runnable, write
from normkit.norms import Norm, make

PARAMETRIZED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)  # layers that get plain weights


class GatedNorm(nn.Module):
    """A norm whose gate, activated, multiplies its input (Mamba 2) or output (Qwen3-Next)."""

    def __init__(self, norm: Norm, activation: nn.Module, gates_input: bool):
        super().__init__()
        self.norm, self.activation, self.gates_input = norm, activation, gates_input
        self.variance_epsilon = norm.eps  # Mamba 2 reads it where it reads `weight`

    @property
    def weight(self) -> Tensor | None:
        """The norm's weight; a RuntimeError on a GPU in training, where Mamba 2 calls a kernel."""
        if self.training and any(t.is_cuda for t in (*self.norm.parameters(), *self.norm.buffers())):
            raise RuntimeError("the model would train with its own kernel for RMSNorm; call it with use_cache=True")
        return getattr(self.norm, "weight", None)

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Normalize `x[..., dim]`, with a gate of its shape."""
        if gate is None:
            return self.norm(x)
        factor = self.activation(gate.to(torch.promote_types(gate.dtype, torch.float32)))
        return (self.norm(x * factor) if self.gates_input else self.norm(x) * factor).to(x.dtype)


@torch.no_grad()
def take_apart(module: nn.Module) -> tuple[nn.Module, nn.Sequential | GatedNorm | None]:
    """Return the norm of a module, and the module with that norm as `norm`.

    This is a `GatedNorm`, or a sequence of the norm and the module's own children. Any other module is returned with
    None.
    """
    if isinstance(module, Norm) or is_parametrized(module) or not is_named_norm(module):
        return module, None
    try:
        with real_tensors():
            for norm, whole in _candidates(module):
                found = read_norm(norm)
                theirs, mine = (copy_without_hooks(runnable(each)).float().eval() for each in (module, whole))
                x = example_of(theirs, found).movedim(-1, found.channel_dim)
                inputs = [(x, x.roll(1, 0)), (x / 100, x)] if isinstance(whole, GatedNorm) else [(x,)]
                if all(_agree(theirs, mine, *each) for each in inputs):
                    take_hooks(whole, module)
                    whole.training = module.training
                    return norm, whole
    except Exception:  # no norm that can be read, or one that takes other inputs
        pass
    return module, None


def _candidates(module: Any) -> Iterator[tuple[nn.Module, nn.Sequential | GatedNorm]]:
    """Ways to take a module apart: its norm, and the module with that norm as `norm`."""
    if type(module).__name__.endswith(("NormGated", "GatedRMSNorm")):
        dim = len(module.weight)
        groups = getattr(module, "n_groups", dim // getattr(module, "group_size", dim))
        norm = make(write("rms", {"eps": read_eps(module), "groups": groups}), dim)
        norm.train(module.training).weight = module.weight
        for activation, gates_input in itertools.product((nn.SiLU(), nn.Sigmoid()), (True, False)):
            yield norm, GatedNorm(norm, activation, gates_input)
    rest = {name: child for name, child in module.named_children() if type(child) is not nn.Identity}
    if rest and "norm" not in rest:
        norm = copy.copy(module)
        norm._modules = {name: nn.Identity() for name in module._modules}
        take_hooks(norm, nn.Identity())
        yield norm, nn.Sequential(OrderedDict(norm=norm, **rest))


def _agree(theirs: nn.Module, mine: nn.Module, x: Tensor, *gate: Tensor) -> bool:
    """Compare two modules; those with a gate may round in another order."""
    y, same = theirs.forward(x.clone(), *gate), mine(x, *gate)
    return torch.allclose(y, same, rtol=1e-4, atol=1e-5 * float(y.abs().max())) if gate else torch.equal(y, same)


def take_norms_apart(model: nn.Module, norms: Collection[str]) -> set[str]:
    """Take apart, in place, modules whose norm is named, as in "bn1.norm"; return those found."""
    found = set()
    for name, module in [*model.named_modules()]:
        if f"{name}.norm" in norms and (whole := take_apart(module)[1]) is not None:
            model.set_submodule(name, whole)
            found.add(f"{name}.norm")
    return found


def plain_weights(model: nn.Module) -> nn.Module:
    """Replace parametrized weights by those of inference, in place; shared ones stay shared."""
    module: Any
    plain: dict[Any, Any] = {}  # of modules that share a matrix, the weight and what it came from
    for module in list(model.modules()):
        steps: Any = getattr(module, "parametrizations", {})
        if isinstance(module, PARAMETRIZED) and list(steps) == ["weight"]:
            steps.eval()
            weight = nn.Parameter(module.weight.detach(), any(p.requires_grad for p in steps.parameters()))
            tensors = *steps.parameters(), *steps.buffers()
            weight = plain.setdefault((*map(type, steps.weight), *map(id, tensors)), (weight, tensors))[0]
            module.__class__ = type_before_parametrizations(module)  # copies share the class: leave it be
            del module.parametrizations
            module.weight = weight
    return model
