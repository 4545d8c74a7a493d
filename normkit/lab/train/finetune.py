"""Fine-tuning: weights that were trained before, in a model with another head and perhaps other norms."""

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from normkit.norms import Norm


def head_of(model: nn.Module, classes: int) -> nn.Linear:
    """The last linear map onto the classes; ValueError where there is none.

    >>> head_of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), 3) is None
    False
    """
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == classes]
    if not heads:
        raise ValueError(f"the model has no linear map onto {classes} classes, so nothing that could be its head")
    return heads[-1]


def read_weights(weights: str) -> dict[str, Tensor]:
    """The tensors of a file of safetensors, or of the model.safetensors of a folder; ValueError where it has none."""
    path = Path(weights)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"weights: {path} is missing; give a .safetensors file or a folder with model.safetensors")
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"weights: {path} is no safetensors file ({error}); pickled weights are not opened here: save them once "
            "with safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
        ) from None


@torch.no_grad()
def start_from(weights: str, model: nn.Module, classes: int) -> list[str]:
    """Load a file of safetensors, or the model.safetensors of a folder, in place; the names that start anew.

    The head may have other classes, and norms may have other statistics: these start anew. Statistics that are loaded
    keep their values, but their warm-up begins again (`reset_warmup`), which Unified Normalization's fine-tuning had to
    be told by hand. ValueError where the file cannot be read, or anything else does not fit.
    """
    saved = read_weights(weights)
    wanted = model.state_dict(keep_vars=True)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, Norm)}
    free = {id(parameter) for parameter in head_of(model, classes).parameters()}
    free |= {id(buffer) for norm in norms.values() for buffer in norm.buffers(recurse=False)}
    fitting = {name: saved[name] for name, old in wanted.items() if name in saved and saved[name].shape == old.shape}
    anew = [name for name, old in wanted.items() if name not in fitting and id(old) in free]
    problems = [
        f"{name} of shape {tuple(saved[name].shape)} in place of {tuple(old.shape)}" if name in saved else f"no {name}"
        for name, old in wanted.items()
        if name not in fitting and id(old) not in free
    ]
    inside = tuple(f"{name}." for name in norms)
    problems += [f"an unknown {name}" for name in saved if name not in wanted and not name.startswith(inside)]
    if problems:
        more = f" and {len(problems) - 1} more differences" if len(problems) > 1 else ""
        raise ValueError(f"weights: {weights} is of another model: it has {problems[0]}{more}")
    model.load_state_dict(fitting, strict=False)
    for norm in norms.values():
        norm.reset_warmup()
    return anew
