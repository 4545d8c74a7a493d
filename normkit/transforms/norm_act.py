"""Take apart modules of norm and activation, such as timm's `BatchNormAct2d`."""

import copy
from collections import OrderedDict
from collections.abc import Collection

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from normkit.norms import Norm
from normkit.transforms.hooks import copy_without_hooks, take_hooks
from normkit.transforms.third_party import example_of, is_named_norm, read_norm, runnable


@torch.no_grad()
def take_apart(module: nn.Module) -> tuple[nn.Module, nn.Sequential | None]:
    """Return the norm of a module, and the module as a sequence of norm and activation.

    The sequence has the norm as `norm`, then the module's own children. Any other module is returned with None.
    """
    rest = {name: child for name, child in module.named_children() if type(child) is not nn.Identity}
    if not rest or "norm" in rest or isinstance(module, Norm) or is_parametrized(module) or not is_named_norm(module):
        return module, None
    norm = copy.copy(module)
    norm._modules = {name: nn.Identity() for name in module._modules}
    take_hooks(norm, nn.Identity())
    whole = nn.Sequential(OrderedDict(norm=norm, **rest))
    try:
        with torch.device("cpu"):  # also where models are built on meta
            found = read_norm(norm)
            theirs, mine = (copy_without_hooks(runnable(each)).float().eval() for each in (module, whole))
            x = example_of(theirs, found).movedim(-1, found.channel_dim)
            if not torch.equal(theirs.forward(x.clone()), mine(x)):
                return module, None
    except Exception:  # no norm that can be read, or one that takes other inputs
        return module, None
    take_hooks(whole, module)
    whole.training = module.training
    return norm, whole


def take_norms_apart(model: nn.Module, norms: Collection[str]) -> set[str]:
    """Take apart, in place, modules whose norm is named, as in "bn1.norm"; return those found."""
    found = set()
    for name, module in [*model.named_modules()]:
        if f"{name}.norm" in norms and (whole := take_apart(module)[1]) is not None:
            model.set_submodule(name, whole)
            found.add(f"{name}.norm")
    return found
