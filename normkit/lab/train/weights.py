"""Files of weights: written whole, checked when read, averaged."""

from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from normkit.files import write_whole

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def save_weights(model: nn.Module, path: Path) -> None:
    """Save parameters and buffers of a model as safetensors; a tensor with several names is saved under the first."""
    write_whole(path, safetensors.torch.save(unshared(model)))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load what `save_weights` saved into a model of the same shape, in place; ValueError where it does not fit."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; the run may not have ended yet")
    try:
        saved = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is cut short or no safetensors file: {error}") from None
    _grow_biases(model, saved)
    fits(saved, unshared(model), path)
    model.load_state_dict(saved, strict=False)


def _grow_biases(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Give those products a bias that have none and were saved with one: folding puts a norm's shift there."""
    for name, module in model.named_modules():
        own = f"{name}.bias" if name else "bias"
        if own in saved and isinstance(module, PRODUCTS) and module.bias is None:
            module.bias = nn.Parameter(module.weight.new_zeros(module.weight.shape[0]))


def fits(saved: dict[str, Tensor], wanted: dict[str, Tensor], path: Path) -> None:
    """ValueError that names a difference, unless both have the same names and shapes."""
    problems = [f"no {name}" for name in wanted if name not in saved]
    problems += [f"an unknown {name}" for name in saved if name not in wanted]
    problems += [
        f"{name} of shape {tuple(saved[name].shape)} in place of {tuple(wanted[name].shape)}"
        for name in wanted
        if name in saved and saved[name].shape != wanted[name].shape
    ]
    if problems:
        more = f" and {len(problems) - 1} more differences" if len(problems) > 1 else ""
        raise ValueError(f"{path} is of another model: it has {problems[0]}{more}")


def mean_weights(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The average of several state dicts, oldest first; counters and other whole numbers are the last one's.

    >>> mean_weights([{"w": torch.ones(()), "n": torch.tensor(3)}, {"w": torch.zeros(()), "n": torch.tensor(5)}])
    {'w': tensor(0.5000), 'n': tensor(5)}
    """
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if last.is_floating_point() else last
        for name, last in states[-1].items()
    }


def unshared(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with one name for each tensor."""
    seen: set[tuple[int, int]] = set()
    kept = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor.detach().cpu().contiguous()
    return kept
