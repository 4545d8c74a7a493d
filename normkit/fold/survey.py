"""A float64 copy of a model, the calls that it is tried on, and their trace."""

import contextlib
import copy
import gc
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit._util import require_flags, require_functions
from normkit.fold.float64 import import_compiler, in_float64, widened
from normkit.fold.inputs import longer, variants
from normkit.fold.report import Audit, Outcome, Report
from normkit.fold.routing import Routing, idle_experts
from normkit.fold.trace import Product, Trace
from normkit.fold.tracer import tracing
from normkit.fold.untie import untie_embeddings
from normkit.models.checks import (
    check_not_meta,
    check_not_quantized,
    check_not_training,
    check_not_wrapped,
    copy_model,
)
from normkit.models.convert import find, put_everywhere, unreadable
from normkit.models.difference import count_infinite, error
from normkit.models.invoke import Call, Pick, advice, example_call, tensors
from normkit.models.lazy import Lazy, memory, side_by_side, without_reading
from normkit.models.model_changes import KEY, record_changes
from normkit.models.take_apart import plain_weights, take_apart
from normkit.models.third_party import Found, read_eps
from normkit.norms import Norm

Outputs = dict[str, Tensor]  # by path in what the model returns
EXAMPLE = "the example"
MEDIA = {"pixel_values", "pixel_values_videos", "input_features", "input_values"}  # arguments of models of transformers
MOST_TURNS = 32  # calls that reach more experts
STATEFUL = (
    "its forward is random or keeps state, so its outputs cannot be compared. Remove what is random, or reset the state"
    " in forward"
)
TOLERANCE = 1e-9  # of the comparison in float64, relative to the largest output


class Survey:
    """A float64 copy of a model, the calls that it was tried on, and the trace of them.

    `outputs` picks what is compared from what the model returns. `untie` gives an output layer that is tied to an
    embedding a copy of its own. With `other` other lengths and sizes are tried, too. Error messages name `verb`, the
    public function. `keep` keeps the architecture; None decides by the model.

    The copy holds no large weight: these are lazy, and read the original where an operation needs them. With `stream`
    reading is slow. So the trace reads no large weight, products with them are random numbers; forwards that are
    compared run side by side, and each reads what the others read.
    """

    def __init__(
        self, model: nn.Module, example: Call, outputs: Pick | None, untie: bool, other: bool, verb: str,
        keep: bool | None = False, stream: bool = False,
    ):  # fmt: skip
        for check in (check_not_wrapped, check_not_quantized, check_not_training, check_not_meta):
            check(model, verb)
        import_compiler()
        require_functions(outputs=outputs)
        require_flags(untie=untie, other_shapes=other, keep_architecture=bool(keep) if keep is None else keep)
        self.given, self.added = without_cache(example.unpacked(model), model)
        if (passed := tensors(self.given)) and not any(t.numel() and not t.is_meta for t in passed.values()):
            raise ValueError(f"{verb}() cannot verify anything on an empty or meta example; pass a batch with rows")
        self.original, self.outputs, self.untie, self.verb = model, outputs, untie, verb
        self.other, self.stream = other, stream
        self.model = self.double()
        own_storage(self.model)
        found = find(self.model)
        self.keep = _has_loader(model, found) if keep is None else keep
        self.trace = Trace(self.model, found, self.keep)
        self.held = own_tensors(self.model)  # kept alive: the trace goes by their ids
        self.trace.entangled = shared_memory(model)
        self.trace.advice = advice(model, self.given)
        self.expected: dict[str, Outputs] = {}
        self.routing: dict[str, Routing] = {}  # calls in which the router has no say
        self.failure = ""  # of the last model that was compared
        with in_float64():
            others = variants(self.model, widened(self.given), other_shapes=other, run=self._record)
            self._record_example(bool(others))
            self._require_norms()
            self.calls: dict[str, Call] = {EXAMPLE: self.given, **others}
            self._reach_experts()
        left_out = {name: parameter.default for name, parameter in self.given.left_out(model).items()}
        self.absent = tuple(
            f"{name}={default}" if isinstance(default, bool | int | float) else name
            for name, default in left_out.items()
            if not _is_known(model) or "mask" in name or isinstance(default, bool)
        )
        self.trace.other_inputs = self._other_inputs()
        if other:
            self._keep_tables_that_grow()

    def copy(self, wide: bool = False) -> nn.Module:
        """A copy of the original, its output layer untied if requested, in its own type unless `wide`."""
        model = plain_weights(copy_model(self.original, wide))
        self.untied = untie_embeddings(model) if self.untie else 0
        return model

    def double(self) -> nn.Module:
        """A copy in float64, with experts of Hugging Face models one by one."""
        model = self.copy(wide=True)
        names = {id(p): name for name, p in model.named_parameters()}
        model = take_all_apart(model)
        self.names = {name: names[id(p)] for name, p in model.named_parameters() if id(p) in names}  # in `copy`
        widen(model)
        return model

    def _other_inputs(self) -> tuple[str, ...]:
        """Modules beside the language model of a model for images or sound, where the example has none.

        A whole module that did not run, such as the tower for images, gives the language model embeddings in place of
        those of tokens: it does not read it.
        """
        if not MEDIA & self.given.left_out(self.original).keys():
            return ()
        ran = [f"{source.name}." for source in self.trace.sources.values() if source.kind == "norm"]
        read = self.trace.weight_consumers.keys() - dict(self.model.named_buffers()).keys()
        used = {*self.trace.uses(), *read, *ran}
        return tuple(
            f"{owner}.{name}" if owner else name
            for owner, module in self.model.named_modules()
            if hasattr(config := getattr(module, "config", None), "text_config") and config.text_config is not config  # pyright: ignore[reportOptionalMemberAccess]
            for name, child in module.named_children()
            if not any(key.startswith(f"{owner}.{name}." if owner else f"{name}.") for key in used)
            and not isinstance(child, nn.Linear)
        )

    def _require_norms(self) -> None:
        """Raise a ValueError for a model without norms, which names what it has."""
        self.unreadable = tuple(f"{name} ({why})" for name, why in unreadable(self.model).items())
        if not self.trace.norms:
            advice = f"it saw {', '.join(self.unreadable)}; modules such as nn.LayerNorm can be read"
            reason = advice if self.unreadable else "a folded model has none"
            raise ValueError(f"{self.verb}() found no norm that it can read; {reason}")

    # -- tracing ------------------------------------------------------------------------------------------------------

    def _record(self, label: str, resized: bool, call: Call) -> None:
        """Trace one call and keep its outputs; a call that fails leaves no trace."""
        before = self.trace
        self.trace = copy.deepcopy(before, {id(before.norms): before.norms})
        self.trace.resizable |= resized
        self.trace.is_example = label == EXAMPLE
        try:
            with without_reading() if self.stream else contextlib.nullcontext():
                answer = self._follow(call)
            if not self.stream:
                self.expected[label] = answer
        except Exception:
            self.trace = before
            raise

    def _record_example(self, after_others: bool) -> None:
        """Trace the example; an error if it runs, but not after other calls."""
        try:
            self._record(EXAMPLE, False, self.given)
        except ValueError as error:
            fresh = False
            with contextlib.suppress(Exception):
                ran = after_others and "could not run" in str(error)
                fresh = ran and widened(self.given).of(self.double()) is not None
            if fresh:
                what = "ran the model on the example, but not after another call"
                raise ValueError(f"{self.verb}() {what} ({error.__cause__}): {STATEFUL}") from error
            raise

    def _reach_experts(self) -> None:
        """Trace the example with other experts as well, until each was used, and try these calls later."""
        before = None
        for turn in range(MOST_TURNS):
            sizes, idle = idle_experts(self.trace, self.model)
            if not idle or idle == before:
                return
            label, routing, before = f"{EXAMPLE}, experts in turn {turn + 1}", Routing(sizes, turn), idle
            with contextlib.suppress(Exception), routing:
                self._record(label, False, self.given)
                if routing.ranked:
                    self.calls[label], self.routing[label] = self.given, routing

    def _follow(self, given: Call) -> Outputs:
        call = widened(given)
        passed = tensors(call)
        state = {name: (t, t._version) for name, t in own_tensors(self.model)}
        with tracing(self.trace, self.model) as tracer:
            for path, tensor in passed.items():
                if tensor.dtype.is_floating_point and tensor.dim() > 2:
                    dim = 1 if tensor.dim() == 4 else -1
                    size = tensor.shape[dim]  # another one in another call, where this axis is no channels'
                    tracer.mark(tensor, self.trace.source(("input", path, size), "input", path, size), dim)
            out = example_call(self.model, call, self.verb, given, "a float64 copy of the model")
            picked = tensors(out, self.outputs)
        self._require_numbers(out, picked)
        answer = {path: t.clone() for path, t in picked.items()}
        for path in picked:
            tracer.note_reader(picked[path], f"the model output ({path})" if path else "the model output")
        now = dict(own_tensors(self.model))
        for name in (name for name, (t, version) in state.items() if now.get(name) is not t or t._version != version):
            self.trace.weight_consumers[name].add("its module, which changes it in forward")
        held = [*passed.values(), *([] if self.outputs else picked.values())]
        known = {id(each) for t in held for each in (t, t._base)}  # of a view, what it is a view of
        if self.outputs:  # else the output may hold more than `tensors` finds
            del out, picked  # the last references to them but those of the model and of cycles
        if any(id(t) not in known for t in tracer.shadows.keys()):  # noqa: SIM118 (a dictionary of weak keys)
            gc.collect()
        for tensor in [t for t in tracer.shadows.keys() if id(t) not in known]:  # noqa: SIM118
            tracer.note_reader(tensor, "something that keeps it after the forward")
        return answer

    def _keep_tables_that_grow(self) -> None:
        """Keep tables in buffers, such as positions, that a longer input makes again."""
        tables = {key.view.parameter for key in self.trace.sources if isinstance(key, Product) and key.kind == "table"}
        for name, table in [(name, table) for name, table in self.model.named_buffers() if name in tables]:
            owner, _, key = name.rpartition(".")
            module = self.model.get_submodule(owner)
            for axis in (axis for axis, length in enumerate(table.shape) if length > 1):
                module._buffers[key] = short = table.narrow(axis, 0, 1)  # so that any input is longer
                with in_float64(), contextlib.suppress(Exception):
                    widened(self.given).of(self.model)
                if module._buffers[key].numel() > short.numel():  # type: ignore[union-attr]
                    self.trace.weight_consumers[name].add("its module, which makes it again for longer inputs")
                module._buffers[key] = table

    def _require_numbers(self, out: Any, picked: Outputs) -> None:
        """Raise a ValueError for NaN and for outputs without finite numbers; masks are infinite."""
        if not picked:
            raise ValueError(f"{self.verb}() found no tensor in the model output ({type(out).__name__}); pass outputs=")
        for path, t in picked.items():
            if t.dtype.is_floating_point and (t.isnan().any() or (t.numel() and not t.isfinite().any())):
                what = "no number is finite" if not t.isfinite().any() else "some numbers are NaN"
                broken = [name for name, t in own_tensors(self.model) if t.isnan().any() or (t == torch.inf).any()]
                hint = [f"{name} is not finite; load or compute it again" for name in broken]
                raise ValueError(
                    f"{self.verb}() cannot verify anything on the example: {what} in the output"
                    f"{f' {path}' if path else ''} of a float64 copy of the model. "
                    f"{[*hint, 'Give an example with finite outputs'][0]}"
                )

    # -- comparing ----------------------------------------------------------------------------------------------------

    def add_longer_call(self) -> None:
        """Also compare on longer sequences, not traced, if the model takes these."""
        with in_float64(), contextlib.suppress(Exception):
            if self.other and (found := longer(widened(self.given))):
                label, call = found
                with without_reading() if self.stream else contextlib.nullcontext():
                    out = widened(call).of(self.model)  # not changed yet
                self._require_numbers(out, answer := tensors(out, self.outputs))
                self.calls[label] = call
                if not self.stream:
                    self.expected[label] = answer

    def worst(self, model: nn.Module) -> float:
        """The largest error of a changed model; inf where it fails, as in `failure`."""
        self.failure = ""
        first = [label for label in self.calls if label not in self.expected]  # of the original, if nothing was traced
        with in_float64():
            outputs: list[Callable[[], Outputs]] = [partial(self._outputs, model, label) for label in self.calls]
            if self.stream:
                jobs = [partial(self._outputs, self.model, label) for label in first] + outputs
                outputs = [job.result for job in side_by_side(jobs)]
                for label in first:
                    self._require_numbers(self.model, answer := outputs.pop(0)())
                    self.expected[label] = answer
            try:
                return max(error(each(), self.expected[label]) for label, each in zip(self.calls, outputs, strict=True))
            except Exception as problem:
                self.failure = f"{type(problem).__name__}: {problem}"
                return float("inf")

    def _outputs(self, model: nn.Module, label: str) -> Outputs:
        """The outputs of a model for one of the calls."""
        model = copy.deepcopy(model) if self.stream else model  # a forward may write to buffers
        with in_float64(), copy.copy(self.routing.get(label, contextlib.nullcontext())):
            return tensors(widened(self.calls[label]).of(model), self.outputs)

    def written_error(self, model: nn.Module) -> float:
        """The error of a model in float64, on the example, whose weights were rounded to their own types."""
        copied = copy_model(model, wide=True)
        widen(copied)
        with in_float64():
            return error(tensors(widened(self.given).of(copied), self.outputs), self.expected[EXAMPLE])

    @torch.no_grad()
    def report(self, changed: nn.Module, outcomes: dict[str, Outcome], worst: float) -> Report:
        """Compare a changed model in its own type; a RuntimeError if its weights overflow there."""
        models, given = [changed, self.original], self.given
        shared = (copy_model(model, share=True) for model in models)  # a forward may write to buffers
        returned = (example_call(each, given.copied(), self.verb, given) for each in shared)
        out, expected = (tensors(each, self.outputs) for each in returned)
        if count_infinite(out) > count_infinite(expected):
            raise RuntimeError(
                f"{self.verb}() verified the result in float64 (error {worst:.1e}), but in the model's own type it has "
                "outputs that are not finite: a changed weight exceeds what its type holds. Transform it in float32: "
                "model.float()"
            )
        record_changes(changed)
        before, now = (sum(p.numel() for p in each.parameters()) for each in (self.original, changed))
        saved = before + self.untied - now
        return Report(**vars(self.audit(outcomes)), max_error=worst, native_error=error(out, expected), saved=saved)

    def audit(self, outcomes: dict[str, Outcome]) -> Audit:
        """Report the outcomes and what was tried."""
        own = [name for name in sorted(self.trace.deciding) if not _is_known(self.model.get_submodule(name))]
        deciding = tuple(name or type(self.original).__name__ for name in own)
        found = (self.absent, self.untied, self.unreadable, self.added, self.trace.other_inputs, deciding)
        return Audit(tuple(outcomes.values()), tuple(self.calls), *found)

    def require_repeatable(self) -> None:
        """Raise a ValueError for a forward that is random or keeps state: copies differ, too."""
        if not self.worst(self.double()) <= 1e-12:
            raise ValueError(f"{self.verb}() ran the model twice on the example and got different outputs: {STATEFUL}")


def widen(model: nn.Module) -> None:
    """Let a copy compute in float64, in place, with experts of Hugging Face models one by one."""
    for module in model.modules():
        if isinstance(module, nn.RMSNorm) and module.eps is None:
            module.eps = read_eps(module)  # of the model's own type, not of float64
        if callable(choose := getattr(module, "set_experts_implementation", None)):
            choose("eager")
    for tensor in (t for _, t in own_tensors(model) if t.dtype.is_floating_point and not isinstance(t, Lazy)):
        tensor.grad, tensor.data = None, tensor.data.double()


def take_all_apart(model: nn.Module) -> nn.Module:
    """Put a norm and the rest in the place of each module that does more than normalize."""
    for name, module in [*model.named_modules()]:
        if (whole := take_apart(module)[1]) is not None:
            model = put_everywhere(model, name, whole)
    return model


def _is_known(module: nn.Module) -> bool:
    """Return True for a class of torch, transformers or here, whose branches keep norms as they are."""
    return type(module).__module__.partition(".")[0] in ("torch", "transformers", "normkit")


def _has_loader(model: nn.Module, found: dict[str, Found]) -> bool:
    """Return True for a model of Hugging Face whose class can open what `keep_architecture` makes of it."""
    stock = hasattr(model, "save_pretrained") and not hasattr(getattr(model, "config", None), KEY)
    return (
        stock
        and not any(isinstance(m, Norm) for m in model.modules())
        and all(f.running is None for f in found.values())
    )


def without_cache(given: Call, model: nn.Module) -> tuple[Call, tuple[str, ...]]:
    """Add `use_cache=False` where a model takes it; also return what was added, in words."""
    names = ("cache", "past_key_values", "cache_params", "use_cache")
    has_cache = any(given.kwargs.get(name) is not None for name in names)
    without = Call(given.args, {**given.kwargs, "use_cache": False})
    with contextlib.suppress(TypeError):
        inspect.signature(model.forward).bind_partial(*without.args, **without.kwargs)  # not given by position
        if not has_cache and "use_cache" in inspect.signature(model.forward).parameters:
            return without, ("use_cache=False",)
    return given, ()


def own_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of a model, by name."""
    return [*model.named_parameters(), *model.named_buffers()]


def shared_memory(model: nn.Module) -> dict[str, str]:
    """Parameters that are different objects in the same memory, by name."""
    seen, found = dict[int, str](), dict[str, str]()
    for name, t in own_tensors(model):
        if t.numel() and (first := seen.setdefault(memory(t), name)) != name:
            found[name], found[first] = first, name
    return found


def own_storage(model: nn.Module) -> None:
    """Make each parameter and buffer contiguous in its own memory; ties stay."""
    seen: set[int] = set()
    for tensor in (t for t in [*model.parameters(), *model.buffers()] if t.layout is torch.strided):
        if isinstance(tensor, Lazy):
            continue
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        if not (whole and tensor.is_contiguous()) or memory(tensor) in seen:
            tensor.data = tensor.data.clone(memory_format=torch.contiguous_format)
        seen.add(memory(tensor))
