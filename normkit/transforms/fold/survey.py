"""A float64 copy of a model, the calls that it is tried on, and their trace."""

import gc
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit.transforms.checks import copy_model, refuse_meta, refuse_quantized, refuse_wrapped
from normkit.transforms.convert import find, unreadable
from normkit.transforms.fold.float64 import in_float64, widened
from normkit.transforms.fold.inputs import SAME_SIZES
from normkit.transforms.fold.trace import Trace
from normkit.transforms.fold.tracer import Tracer, tracing
from normkit.transforms.fold.verify import Verifier
from normkit.transforms.invoke import advice, tensors


class Survey:
    """A float64 copy of a model, the calls that it was tried on, and the trace of them."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        outputs: Any,
        untie: bool,
        other: bool,
        verb: str,
        step: Callable[[str], None] = lambda label: None,
    ):
        refuse_wrapped(model, verb)
        refuse_quantized(model, verb)
        refuse_training(model, verb)
        refuse_meta(model, verb)
        names = {name: found.channel_dim for name, found in find(model).items()}
        if not names:
            seen = ", ".join(f"{name}: {why}" for name, why in unreadable(model).items())
            raise ValueError(f"{verb}() found no norm that it can read" + (f"; it saw {seen}" if seen else ""))
        self.original, self.untie, self.step = model, untie, step
        self.model = self.double()
        own_storage(self.model)
        self.verifier = Verifier(self.model, args, kwargs, outputs, verb)
        self.trace = Trace(self.model, names, resizable=True)
        self.trace.entangled = shared_memory(model)
        self.trace.advice = lambda weights: advice(model, weights, args, kwargs)
        self.verifier.record(self.model, self._traced, other)
        self.calls = self.verifier.calls

    def copy(self) -> nn.Module:
        """A copy of the original in its own type, its output layer untied if requested."""
        model = copy_model(self.original)
        if self.untie:
            untie_embeddings(model)
        return model

    def double(self) -> nn.Module:
        """A copy in float64, with experts of Hugging Face models one by one."""
        model = self.copy().double()
        for module in model.modules():
            if callable(choose := getattr(module, "set_experts_implementation", None)):
                choose("eager")
        return model

    def measure(self, batches: Iterable[Any]) -> None:
        """Measure the ranges of sums on batches in place of the example."""
        for source in self.trace.sources.values():
            source.range = None
        self.trace.measuring = True
        with in_float64():
            for batch in map(widened, batches):
                if isinstance(batch, Mapping):
                    self._follow((), dict(batch))
                else:
                    self._follow(tuple(batch) if isinstance(batch, tuple | list) else (batch,), {})

    def _traced(self, label: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """Trace one call and return its outputs; a call that fails leaves no trace."""
        self.step(f"trace {label}")
        if label in SAME_SIZES:
            self.trace.resizable = any(known not in SAME_SIZES for known in self.verifier.expected)
        restore = self.trace.snapshot()
        self.trace.measuring = label == "the example"
        try:
            return self._follow(args, kwargs)
        except Exception:
            restore()
            raise

    def _follow(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        passed = tensors((args, kwargs))
        with tracing(self.trace, self.model) as tracer:
            for path, tensor in passed.items():
                if tensor.dtype.is_floating_point and tensor.dim() > 2:
                    dim = 1 if tensor.dim() == 4 else -1
                    size = tensor.shape[dim]  # another one in another call, where this axis is no channels'
                    tracer.mark(tensor, self.trace.source(("input", path, size), "input", path, size), dim)
            out = self.model(*args, **kwargs)
            picked = self.verifier.outputs(out) if self.verifier.outputs else out
            given = tensors(picked)
        answer = self.verifier.pick(out)
        self._read_outputs(tracer, given)
        del out, picked, given
        known = {id(t) for t in passed.values()} | tracer.tables
        if any(id(t) not in known for t in tracer.shadows.keys()):  # noqa: SIM118 (a dictionary of weak keys)
            gc.collect()
        for tensor in [t for t in tracer.shadows.keys() if id(t) not in known]:  # noqa: SIM118
            tracer.read(tensor, "something that keeps it after the forward")
        return answer

    def _read_outputs(self, tracer: Tracer, given: dict[str, Tensor]) -> None:
        for path, tensor in given.items():
            tracer.read(tensor, f"the caller of the model ({path})" if path else "the caller of the model")


def refuse_training(model: nn.Module, verb: str) -> None:
    """Raise a ValueError unless every module is in evaluation mode."""
    training = [name for name, module in model.named_modules() if module.training]
    if training:
        where = "the model" if "" in training else training[0]
        raise ValueError(
            f"{verb}() works on a model for inference, and {where} is in training mode; call model.eval() first"
        )


def untie_embeddings(model: nn.Module) -> list[str]:
    """Give layers that are tied to an embedding a weight of their own; return their names."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    copies: dict[int, nn.Parameter] = {}
    untied = []
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and id(weight) in tables and not isinstance(module, nn.Embedding):
            own = copies.setdefault(id(weight), nn.Parameter(weight.detach().clone(), weight.requires_grad))
            module.weight = own
            untied.append(name)
    return untied


def shared_memory(model: nn.Module) -> dict[str, str]:
    """Parameters that are different objects in the same memory, by name."""
    seen: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if not parameter.numel():
            continue
        storage = parameter.untyped_storage().data_ptr()
        if storage in seen:
            found[name], found[seen[storage]] = seen[storage], name
        seen.setdefault(storage, name)
    return found


def own_storage(model: nn.Module) -> None:
    """Make each parameter and buffer contiguous in its own memory; ties stay."""
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
