"""Call a model on a batch, and find the tensors in its output."""

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Forward = Callable[[nn.Module, Any], Any]  # calls a model on a batch
Pick = Callable[[Any], Any]  # picks what is used of a model's output


class Call(NamedTuple):
    """The arguments of a call of a model; prints as `(float32[2, 3], mask=bool[2])`."""

    args: tuple
    kwargs: dict[str, Any]

    def of(self, model: nn.Module) -> Any:
        """Call a model with these arguments."""
        return model(*self.args, **self.kwargs)

    def copied(self, change: Callable[[Tensor], Tensor] = Tensor.clone) -> "Call":
        """Copy the arguments; `change` makes the copy of a tensor."""
        with contextlib.suppress(TypeError):  # of what cannot be copied, such as a lock
            return copy.deepcopy(self, {id(t): change(t) for t in tensors(self).values()})
        return tree_map_only(Tensor, change, self)

    def unpacked(self, model: nn.Module) -> "Call":
        """Return the arguments of an example; one mapping holds keywords if the forward has them."""
        if len(self.args) == 1 and not self.kwargs and isinstance(self.args[0], Mapping):
            with contextlib.suppress(TypeError):  # the model takes a mapping
                inspect.signature(model.forward).bind(**self.args[0])
                return arguments(self.args[0])
        return self

    def left_out(self, model: nn.Module) -> dict[str, inspect.Parameter]:
        """Return the parameters of a model's forward that the call leaves out or passes as None."""
        signature = inspect.signature(model.forward)
        takes = {name: p for name, p in signature.parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        try:
            bound = signature.bind_partial(*self.args, **self.kwargs).arguments
            passed = {key for key, value in bound.items() if value is not None}
        except TypeError:
            passed = set(self.kwargs)
        return {name: parameter for name, parameter in takes.items() if name not in passed}

    def __str__(self) -> str:
        given = [*map(describe, self.args), *(f"{name}={describe(each)}" for name, each in self.kwargs.items())]
        return f"({', '.join(given)})"


def arguments(batch: Any) -> Call:
    """Return the arguments that `call` makes of a batch."""
    if isinstance(batch, Mapping):
        return Call((), dict(batch))
    return Call(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})


def call(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Call a model on a batch, or `forward(model, batch)` instead, and return the output.

    A batch is a mapping of keyword arguments, a tuple or list of positional ones, or one argument.
    """
    if forward is not None:
        return forward(model, batch)
    given = arguments(batch)
    try:
        return given.of(model)
    except TypeError as error:
        pick = "pick the inputs of the model with forward=lambda model, batch: model(...)"
        raise TypeError(f"{error}. The batch was given as {given}; {pick}") from error


def check_batches(batches: object, what: str) -> None:
    """Raise a TypeError for a single batch, each of whose rows would be used as a batch."""
    if not isinstance(batches, Iterable) or isinstance(batches, Tensor | str | bytes | Mapping):
        given = describe(batches)
        raise TypeError(f"{what} takes batches to go through; got one {given}. Give a list of it, [x], or a loader")


def example_call(model: nn.Module, given: Call, verb: str, shown: Call, what: str = "the model") -> Any:
    """Run a model on an example, and return its output.

    A ValueError lists the arguments of both if the example does not fit the forward. For this message, `verb` is the
    public function that was called, `shown` the example as the user passed it, and `what` the model or a copy of it.
    """
    try:
        return given.of(model)
    except Exception as error:
        takes = ", ".join(map(str, inspect.signature(model.forward).parameters.values()))
        raise ValueError(
            f"{verb}() could not run {what} on the example {shown}: {type(error).__name__}: {error}. "
            f"Its forward takes ({takes}); pass the example as you would call the model"
        ) from error


def describe(value: object) -> str:
    """A value in a few characters: type and shape of a tensor."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value) if isinstance(value, bool | int | float | str | type(None)) else type(value).__name__


def input_and_mask(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
    """Return `x` and `mask` of a call of a norm, from the arguments that a hook gets."""
    return args[0] if args else kwargs["x"], args[1] if len(args) > 1 else kwargs.get("mask")


@contextlib.contextmanager
def seen(
    model: nn.Module, names: Iterable[str], see: Callable[[str, Tensor, Tensor | None, Tensor], None]
) -> Iterator[None]:
    """Call `see(name, x, mask, y)` inside the block whenever one of these modules has computed `y`."""

    def hook(name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], y: Tensor) -> None:
        x = args[0] if args else next(iter(kwargs.values()))
        see(name, x, args[1] if len(args) > 1 else kwargs.get("mask"), y)

    with contextlib.ExitStack() as hooks:
        for name in names:
            module = model.get_submodule(name)
            hooks.enter_context(module.register_forward_hook(functools.partial(hook, name), with_kwargs=True))
        yield


PLAIN = (str, bytes, int, float, bool, torch.dtype, type, torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN_OPTIONS = (
    "cache", "past_key_values", "inputs_embeds", "position_ids", "head_mask", "use_cache", "return_dict", "output_",
)  # fmt: skip


def advice(model: nn.Module, given: Call) -> str:
    """Advise on an example that would use weights which the given one does not."""
    left = given.left_out(model).items()
    names = [name for name, p in left if p.default is None and not name.startswith(PLAIN_OPTIONS)]
    also = f", perhaps with {' or '.join(names[:4])}" if names else ""
    return f"pass an example that does{also}, or set to None what inference never uses"


def tensors(output: Any, outputs: Pick | None = None, depth: int = 6) -> dict[str, Tensor]:
    """Find all tensors in tuples, mappings, dataclasses and plain objects, by their path.

    Only those in `outputs(output)`, if it is given.

    Examples:
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
