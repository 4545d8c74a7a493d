"""Call a model on a batch, and find the tensors in its output."""

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only


def call(model: nn.Module, batch: Any, forward: Callable[[nn.Module, Any], Any] | None = None) -> Any:
    """Call a model on a batch.

    Args:
        model: The model.
        batch: A mapping of keyword arguments, a tuple or list of positional ones, or one argument.
        forward: Called as `forward(model, batch)` instead.

    Returns:
        The output of the model.

    Example:
        >>> call(nn.Linear(2, 3), (torch.zeros(4, 2),)).shape
        torch.Size([4, 3])
    """
    if forward is not None:
        return forward(model, batch)
    args, kwargs = arguments(batch)
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        raise TypeError(
            f"{error}. The batch was given as {describe_call(args, kwargs)}; pick the inputs of the model with "
            "forward=lambda model, batch: model(...)"
        ) from error


def arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """Return the positional and keyword arguments that `call` makes of a batch."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,), {}


def unpacked(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Return the arguments of an example; one mapping holds keywords if the forward has them."""
    if len(args) == 1 and not kwargs and isinstance(args[0], Mapping):
        with contextlib.suppress(TypeError):  # the model takes a mapping
            inspect.signature(model.forward).bind(**args[0])
            return arguments(args[0])
    return args, kwargs


def check_batches(batches: object, what: str) -> None:
    """Raise a TypeError for a single batch, each of whose rows would be used as a batch."""
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | str | bytes | Mapping):
        given = describe(batches)
        raise TypeError(f"{what} takes batches to go through; got one {given}. Give a list of it, [x], or a loader")


def example_call(
    model: nn.Module, args: tuple, kwargs: dict[str, Any], verb: str, shown: tuple, what: str = "the model"
) -> Any:
    """Run a model on an example, and return its output.

    A ValueError lists the arguments of both if the example does not fit the forward. For this message, `verb` is the
    public function that was called, `shown` the example `(args, kwargs)` as the user passed it, and `what` the model or
    a copy of it.
    """
    try:
        return model(*args, **kwargs)
    except Exception as error:
        takes = ", ".join(map(str, inspect.signature(model.forward).parameters.values()))
        raise ValueError(
            f"{verb}() could not run {what} on the example {describe_call(*shown)}: {type(error).__name__}: {error}. "
            f"Its forward takes ({takes}); pass the example as you would call the model"
        ) from error


def copied(given: tuple[Any, Any], change: Callable[[Tensor], Tensor] = Tensor.clone) -> tuple[Any, Any]:
    """Copy the arguments `(args, kwargs)` of a call; `change` makes the copy of a tensor."""
    with contextlib.suppress(TypeError):  # of what cannot be copied, such as a lock
        return copy.deepcopy(given, {id(t): change(t) for t in tensors(given).values()})
    return tree_map_only(Tensor, change, given)


def describe(value: object) -> str:
    """A value in a few characters: type and shape of a tensor.

    >>> describe(torch.zeros(2, 3))
    'float32[2, 3]'
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__


def describe_call(args: tuple, kwargs: dict[str, Any]) -> str:
    """Arguments of a call, as in `(float32[2, 3], mask=bool[2])`."""
    return f"({', '.join([*map(describe, args), *(f'{name}={describe(each)}' for name, each in kwargs.items())])})"


def input_and_mask(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return `x` and `mask` of a call of a norm, from the arguments that a hook gets."""
    return args[0] if args else kwargs["x"], args[1] if len(args) > 1 else kwargs.get("mask")


USED_BY = {  # part of a weight's name: arguments that make a model of transformers use such weights
    "global": ("global_attention_mask",),
    "encoder_attn": ("encoder_hidden_states",),
    "crossattention": ("encoder_hidden_states",),
    "cross_attn": ("encoder_hidden_states", "cross_attention_states"),
    "cross_attention": ("encoder_hidden_states", "cross_attention_states"),
    "token_type": ("token_type_ids",),
    "decoder": ("decoder_input_ids",),
    "vision": ("pixel_values",),
    "visual": ("pixel_values",),
    "image": ("pixel_values",),
    "audio": ("input_features", "input_values"),
    "mtp": ("labels",),
    "router": ("output_router_logits",),
}
PLAIN = (str, bytes, int, float, bool, torch.dtype, type, torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN_OPTIONS = ("past_key_values", "inputs_embeds", "position_ids", "head_mask", "use_cache", "return_dict", "output_")


def advice(model: nn.Module, weights: Iterable[str], args: tuple, kwargs: Mapping[str, Any]) -> str:
    """Advise on an example that would use weights which the example `(args, kwargs)` does not.

    The arguments to pass follow from the names of the weights and the signature of the forward.

    Example:
        >>> class Pair(nn.Module):
        ...     def forward(self, input_ids, encoder_hidden_states=None): ...
        >>> advice(Pair(), ["layer.0.crossattention.key.weight"], (), {"input_ids": 0})
        'pass encoder_hidden_states'
    """
    left, weights = arguments_left(model, args, kwargs), list(weights)
    uses = [arguments for part, arguments in USED_BY.items() if any(part in weight for weight in weights)]
    if likely := [argument for arguments in uses for argument in arguments if argument in left]:
        return f"pass {' or '.join(dict.fromkeys(likely))}"
    if any("expert" in weight for weight in weights):
        return "pass more rows, which reach more experts"
    left = [name for name, p in left.items() if p.default is None and not name.startswith(PLAIN_OPTIONS)]
    also = f", whose forward also takes {', '.join(left[:4])}" if left else ""
    return f"give an example that does{also}, or set to None what inference never uses"


def arguments_left(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of a model's forward that a call leaves out or passes as None.

    Example:
        >>> list(arguments_left(nn.Bilinear(1, 1, 1), (0,), {}))
        ['input2']
    """
    signature = inspect.signature(model.forward)
    takes = {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    try:
        passed = {key for key, value in signature.bind_partial(*args, **kwargs).arguments.items() if value is not None}
    except TypeError:
        passed = set(kwargs)
    return {name: parameter for name, parameter in takes.items() if name not in passed}


def tensors(output: Any, outputs: Callable[[Any], Any] | None = None, depth: int = 6) -> dict[str, Tensor]:
    """Find all tensors in tuples, mappings, dataclasses and plain objects, by their path.

    Only those in `outputs(output)`, if it is given.

    Example:
        >>> list(tensors({"logits": torch.zeros(1), "past": (torch.zeros(2), None)}))
        ['logits', 'past.0']
    """
    try:
        output = outputs(output) if outputs else output
    except Exception as problem:
        raise ValueError(f"could not apply outputs= to what the model returned: {problem}") from problem
    if isinstance(output, Tensor):
        return {"": output}
    if depth == 0 or output is None or isinstance(output, PLAIN):
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
        for path, tensor in tensors(part, depth=depth - 1).items():
            found[f"{key}.{path}" if path else str(key)] = tensor
    return found
