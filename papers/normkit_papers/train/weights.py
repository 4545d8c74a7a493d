"""Weight files: written atomically, checked when read; averages of weights."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from normkit._util import write_whole

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def save_weights(model: nn.Module, path: Path) -> None:
    """Save parameters and buffers as safetensors, shared tensors under their first name."""
    write_whole(path, safetensors.torch.save(unshared(model)))


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights that `save_weights` saved, in place.

    Raises:
        ValueError: If the file is missing or damaged, or has other names, shapes or kinds of numbers.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; the run may not have ended yet")
    try:
        saved = safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is cut short or not a safetensors file: {error}") from None
    _extend(model, saved)
    check_fit(saved, unshared(model), path)
    model.load_state_dict(saved, strict=False)


def _extend(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Add what folding added: biases, and buffers that differ from the constructor's."""
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        module._non_persistent_buffers_set -= {k for k in module._buffers if f"{prefix}{k}" in saved}
        if f"{prefix}bias" in saved and isinstance(module, PRODUCTS) and module.bias is None:
            module.bias = nn.Parameter(module.weight.new_zeros(module.weight.shape[0]))


def check_fit(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], path: Path) -> None:
    """Raise a ValueError unless names, shapes and kinds of numbers are the same."""
    problems = [problem for name in expected if (problem := misfit(name, saved, expected))]
    raise_misfit(f"{path}", [*problems, *(f"an unknown {name}" for name in saved if name not in expected)])


def misfit(name: str, saved: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Describe why a saved tensor does not fit; empty if it does."""
    if name not in saved:
        return f"no {name}"
    there, here = saved[name], expected[name]
    if there.shape != here.shape:
        return f"{name} of shape {tuple(there.shape)} in place of {tuple(here.shape)}"
    if there.is_floating_point() != here.is_floating_point():
        return f"{name} of type {there.dtype} in place of {here.dtype}"
    return ""


def raise_misfit(origin: str, problems: Iterable[str]) -> None:
    """Raise a ValueError that names the first of several problems, if there are any."""
    if problems := list(problems):
        more = f" and {len(problems) - 1} more differences" if len(problems) > 1 else ""
        raise ValueError(f"{origin} is of another model: it has {problems[0]}{more}")


def mean_weights(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average several state dicts, oldest first; integers are those of the last one.

    >>> mean_weights([{"w": torch.ones(()), "n": torch.tensor(3)}, {"w": torch.zeros(()), "n": torch.tensor(5)}])
    {'w': tensor(0.5000), 'n': tensor(5)}
    """
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if last.is_floating_point() else last
        for name, last in states[-1].items()
    }


def unshared(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict with one name for each tensor."""
    seen: set[tuple[int, int]] = set()
    kept = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
        if tensor.numel() and key in seen:
            continue
        seen.add(key)
        kept[name] = tensor.detach().cpu().contiguous()
    return kept
