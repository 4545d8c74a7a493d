"""Fine-tuning: load pretrained weights into a classifier or a detector's backbone."""

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from normkit.norms import Norm
from normkit_papers.train.weights import misfit, raise_misfit


def head_of(model: nn.Module, classes: int) -> nn.Linear:
    """Return the last linear layer with one output per class.

    Raises:
        ValueError: If there is none.

    >>> head_of(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), 3)
    Linear(in_features=8, out_features=3, bias=True)
    """
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == classes]
    if not heads:
        raise ValueError(f"the model has no linear layer with {classes} outputs, so no head")
    return heads[-1]


def read_weights(weights: str) -> dict[str, Tensor]:
    """Read a safetensors file, or the model.safetensors of a folder.

    Raises:
        ValueError: If there is no such file.
    """
    path = Path(weights)
    path = path / "model.safetensors" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"weights: {path} is missing; give a .safetensors file or a folder with model.safetensors")
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"weights: {path} is not a safetensors file ({error}); pickled weights are not opened here: save them once "
            "with safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
        ) from None


@torch.no_grad()
def start_from(weights: str, model: nn.Module, head: nn.Module | None = None, prefix: str = "") -> list[str]:
    """Load pretrained weights into a model, in place.

    The head may have other classes and norms may have other statistics: these keep their initial values. The warm-up
    of loaded statistics begins again (`reset_warmup`), which Unified Normalization's fine-tuning script does by hand.

    Args:
        weights: A safetensors file, or a folder with model.safetensors.
        model: A classifier, or the part of a detector that a classifier has, too.
        head: The classifier's last layer.
        prefix: Prefix of the names in the file; all others are left out.

    Returns:
        Names of the tensors that keep their initial values.

    Raises:
        ValueError: If the file cannot be read or anything else does not fit.
    """
    saved = {name.removeprefix(prefix): t for name, t in read_weights(weights).items() if name.startswith(prefix)}
    expected = model.state_dict(keep_vars=True)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, Norm)}
    free = {id(parameter) for parameter in head.parameters()} if head is not None else set[int]()
    free |= {id(buffer) for norm in norms.values() for buffer in norm.buffers(recurse=False)}
    misfits = {name: problem for name in expected if (problem := misfit(name, saved, expected))}
    of_norms = tuple(f"{name}." for name in norms)
    raise_misfit(
        f"weights: {weights}",
        [
            *(problem for name, problem in misfits.items() if id(expected[name]) not in free),
            *(f"an unknown {name}" for name in saved if name not in expected and not name.startswith(of_norms)),
        ],
    )
    model.load_state_dict({name: saved[name] for name in expected if name not in misfits}, strict=False)
    for norm in norms.values():
        norm.reset_warmup()
    return list(misfits)
