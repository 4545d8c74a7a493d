"""Run somebody's model on somebody's batch, and find the tensors in what comes out."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def call(model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any] | None = None) -> Any:
    """`forward(model, batch)`; without one, a mapping is keywords, a tuple or list is arguments, else one argument.

    >>> call(nn.Linear(2, 3), (torch.zeros(4, 2),)).shape
    torch.Size([4, 3])
    """
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def example_call(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], verb: str, shown: tuple, what: str = "the model"
) -> Any:
    """The model's output on an example; ValueError, saying what the model takes, where the example does not fit it.

    For the message: `shown` is the example as the user passed it, `(args, kwargs)`, `what` is run, the model or a copy.
    """
    try:
        return model(*args, **kwargs)
    except Exception as error:
        given = ", ".join([describe(a) for a in shown[0]] + [f"{key}={describe(v)}" for key, v in shown[1].items()])
        takes = ", ".join(map(str, inspect.signature(model.forward).parameters.values()))
        raise ValueError(
            f"{verb}() could not run {what} on the example ({given}): {type(error).__name__}: {error}. "
            f"Its forward takes ({takes}); pass the example as you would call the model"
        ) from error


def describe(value: object) -> str:
    """A value in a few characters: type and shape of a tensor.

    >>> describe(torch.zeros(2, 3))
    'float32[2, 3]'
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__


def tensors(output: Any, depth: int = 6) -> dict[str, Tensor]:
    """All tensors in an output by their path: in tuples, mappings, dataclasses and plain objects.

    >>> list(tensors({"logits": torch.zeros(1), "past": (torch.zeros(2), None)}))
    ['logits', 'past.0']
    """
    if isinstance(output, Tensor):
        return {"": output}
    if depth == 0 or output is None or isinstance(output, str | bytes | int | float | bool | torch.dtype | type):
        return {}
    if isinstance(output, Mapping):
        parts = dict(output)
    elif isinstance(output, tuple | list | set):
        named = getattr(output, "_fields", None)
        parts = dict(zip(named or range(len(output)), output, strict=True))
    elif dataclasses.is_dataclass(output):
        parts = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
    else:
        parts = getattr(output, "__dict__", {})
    found = {}
    for key, part in parts.items():
        for path, tensor in tensors(part, depth - 1).items():
            found[f"{key}.{path}" if path else str(key)] = tensor
    return found
