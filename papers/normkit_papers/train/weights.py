"""Weights: files of a model, checkpoints of a run, pretrained ones to start from."""

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from normkit._util import write_whole
from normkit.norms import Norm

PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def save_weights(model: nn.Module, path: Path) -> None:
    """Save parameters and buffers as safetensors, shared tensors under their first name."""
    write_whole(path, safetensors.torch.save(unshared(model)))


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file.

    Raises:
        ValueError: If it is missing or damaged.
    """
    if not path.is_file():
        raise ValueError(f"{path} is missing; the run may not have ended yet")
    try:
        return safetensors.torch.load_file(path)
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is cut short or not a safetensors file: {error}") from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the weights that `save_weights` saved, in place.

    Raises:
        ValueError: If the file is missing or damaged, or has other names, shapes or kinds of numbers.
    """
    saved = read_weights(path)
    for name, module in model.named_modules():  # what folding added: biases, and buffers unlike the constructor's
        prefix = f"{name}." if name else ""
        module._non_persistent_buffers_set -= {k for k in module._buffers if f"{prefix}{k}" in saved}
        if f"{prefix}bias" in saved and isinstance(module, PRODUCTS) and module.bias is None:
            module.bias = nn.Parameter(module.weight.new_zeros(module.weight.shape[0]))
    check_fit(saved, unshared(model), path)
    model.load_state_dict(saved, strict=False)


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


def check_fit(saved: Mapping[str, Tensor], expected: Mapping[str, Tensor], origin: object) -> None:
    """Raise a ValueError unless names and shapes are the same."""
    wrong = [
        f"{name} {_kind(saved, name)}, not {_kind(expected, name)}"
        for name in dict.fromkeys((*expected, *saved))
        if _kind(saved, name) != _kind(expected, name)
    ]
    if wrong:
        more = f" and {len(wrong) - 1} more differences" if wrong[1:] else ""
        raise ValueError(f"{origin} is of another model: it has {wrong[0]}{more}")


def _kind(tensors: Mapping[str, Tensor], name: str) -> str:
    if name not in tensors:
        return "missing"
    tensor = tensors[name]
    return f"of {'' if tensor.is_floating_point() else 'whole '}numbers {tuple(tensor.shape)}"


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint of Lightning's Trainer; nothing in it is executed.

    Raises:
        ValueError: If the file is cut short or is not a checkpoint of a run.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0].split(". ")[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} is cut short or not a checkpoint of a run ({reason}); delete it to resume from the one before it, "
            "or from the start"
        ) from None
    if not isinstance(content, dict) or "state_dict" not in content:
        raise ValueError(f"{path} is not a checkpoint of a run: it has no weights; delete it")
    return content


def model_state(checkpoint: dict[str, Any]) -> dict[str, Tensor]:
    """Return the state dict of the model in a checkpoint."""
    state = checkpoint["state_dict"]
    return {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}


def mean_weights(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Average several state dicts, oldest first; integers are those of the last one.

    >>> mean_weights([{"w": torch.ones(()), "n": torch.tensor(3)}, {"w": torch.zeros(()), "n": torch.tensor(5)}])
    {'w': tensor(0.5000), 'n': tensor(5)}
    """
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if last.is_floating_point() else last
        for name, last in states[-1].items()
    }


@torch.no_grad()
def start_from(weights: str, model: nn.Module, head: nn.Module | None = None, prefix: str = "") -> list[str]:
    """Load pretrained weights into a model, in place.

    The last layer, `head`, may have other classes and norms may have other statistics: these keep their initial values.
    The warm-up of loaded statistics begins again (`reset_warmup`), which Unified Normalization's fine-tuning script
    does by hand. Of the file, names with the prefix count.

    Returns:
        Names of the tensors that keep their initial values.

    Raises:
        ValueError: If the file cannot be read or anything else does not fit.
    """
    path = Path(weights)
    saved = read_weights(path / "model.safetensors" if path.is_dir() else path)
    saved = {name.removeprefix(prefix): tensor for name, tensor in saved.items() if name.startswith(prefix)}
    expected = model.state_dict(keep_vars=True)
    norms = {name: module for name, module in model.named_modules() if isinstance(module, Norm)}
    free = {id(parameter) for parameter in (head.parameters() if head is not None else ())}
    free |= {id(buffer) for norm in norms.values() for buffer in norm.buffers(recurse=False)}
    new = [n for n, tensor in expected.items() if id(tensor) in free and _kind(saved, n) != _kind(expected, n)]
    of_norms = tuple(f"{name}." for name in norms)
    kept = {n: t for n, t in saved.items() if n not in new and (n in expected or not n.startswith(of_norms))}
    check_fit(kept, {name: tensor for name, tensor in expected.items() if name not in new}, weights)
    model.load_state_dict(kept, strict=False)
    for norm in norms.values():
        norm.reset_warmup()
    return new
