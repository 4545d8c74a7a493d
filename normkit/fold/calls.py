"""Norms that a forward calls as functions, such as `F.batch_norm` with parameters and buffers of the module."""

import inspect
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from normkit.models.third_party import Found

if TYPE_CHECKING:
    from normkit.fold.tracer import Tracer

FUNCTIONS = {F.batch_norm, F.layer_norm, F.rms_norm, F.group_norm, F.instance_norm, torch.layer_norm, torch.rms_norm}
BATCH_NORM = inspect.signature(F.batch_norm)


class NormCall(NamedTuple):
    """A frozen batch norm that a forward calls: the names of its tensors, which nothing else owns, and eps."""

    mean: str
    variance: str
    weight: str
    bias: str
    eps: float

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of its tensors."""
        return self[:4]


class NormCalls(TorchFunctionMode):
    """Treats calls of frozen batch norms as norms, and notes where a forward calls others.

    A norm has the name of its weight.
    """

    def __init__(self, tracer: "Tracer"):
        super().__init__()
        self.tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call a norm; the trace sees none of its operations."""
        kwargs, tracer = kwargs or {}, self.tracer
        if func not in FUNCTIONS or tracer.inside_norm:
            return func(*args, **kwargs)
        x = args[0] if args else kwargs["input"]
        if func is not F.batch_norm or (call := self._frozen(*args, **kwargs)) is None:
            tracer.trace.called[tracer.module].add(f"F.{func.__name__}")
            return func(*args, **kwargs)
        if call.weight not in tracer.trace.calls:
            tracer.trace.calls[call.weight], tracer.trace.norms[call.weight] = call, self._read(call)
        tracer.read_norm(call.weight, x)
        out = func(*args, **kwargs)
        tracer.write_norm(call.weight, out)
        return out

    def _frozen(self, *args: Any, **kwargs: Any) -> NormCall | None:
        """Read a call of a batch norm that uses the tensors of one module, and only those."""
        given = BATCH_NORM.bind(*args, **kwargs)
        given.apply_defaults()
        trace, each = self.tracer.trace, given.arguments
        names = [trace.names.get(id(each[key]), "") for key in ("running_mean", "running_var", "weight", "bias")]
        alone = all(name and len(trace.owners[name]) == 1 for name in names) and len(set(names)) == 4
        return NormCall(*names, each["eps"]) if alone and not each["training"] else None  # pyright: ignore[reportCallIssue]

    def _read(self, call: NormCall) -> Found:
        mean, variance, weight, bias = (self.tracer.tensors[name] for name in call.tensors)
        with _disable_current_modes():  # which would take this for an operation of the model
            running = torch.stack([mean, variance])
        return Found(len(mean), call.eps, weight, bias, "batch", channel_dim=1, running=running)
