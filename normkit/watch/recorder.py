"""Hooks that measure a model's norms, and do not change the training."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

import normkit.watch.graph_ops as graph_ops
from normkit._util import is_int, listed, require, warn
from normkit.kernels.records import is_recomputed
from normkit.kernels.sync import is_distributed
from normkit.models.checks import check_is_model
from normkit.models.invoke import input_and_mask
from normkit.models.masks import unfit_length
from normkit.norms import Norm
from normkit.watch.collect import Fields, Memory, Moments, Sample, evaluate, gather, gather_gradient, moments
from normkit.watch.losses import LossMeter
from normkit.watch.quantities import choose
from normkit.watch.rows import Rows, Sink
from normkit.watch.sites import Padding, Site, sites

BACKWARD = {"g_mu", "g_sigma2", "g_psi2", "dx_square", "dy_square", "no_gradient", "channel_g", "window_g"}
WHOLE = {"gradient", "loss", "constant_loss"}  # statistics of the whole model
Loss = nn.Module | Callable[[], Tensor | float] | None
LOSSES = "(losses)"  # key in a state, where modules have their names
NO_KEY = 0  # of a recorder that is a copy


class Recorder:
    """Hooks on the norms of a model, and the count of steps that decides when they measure.

    Arguments as for `record`; `start` is the number of steps that a resumed run has behind it. After `follow()` each
    training forward of the model is a step. A loop that calls only parts of a model calls `begin_step()` before each
    step and `end_forward()` after it instead.

    Attributes:
        rows: The rows recorded so far.
        step: Number of the current step.
        due: True in a step that is measured.
    """

    def __init__(
        self, model: nn.Module, every: int = 25, quantities: str | Iterable[str] | None = None, *, loss: Loss = None,
        to: Sink = None, keep: int = 200_000, start: int = 0,
    ):  # fmt: skip
        _check(model, loss, every)
        self.model, self.every, self.step = model, every, start
        self.chosen = choose(quantities)
        self.needs = frozenset().union(*(quantity.needs for quantity in self.chosen.values()))
        self.due = self.active = self._is_open = False
        found = sites(model)
        if self.needs - WHOLE and not found:
            kinds = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            raise ValueError(
                f"record() found no norm: classes seen: {kinds}. A quantity of the whole model can be recorded by name:"
                ' quantities=["loss", "constant_loss", "gradient_norm"]'
            )
        self.writes = not is_distributed() or torch.distributed.get_rank() == 0
        if not self.writes:  # the other processes take part where statistics are reduced over all of them
            found = [site for site in found if getattr(site.module, "sync", False)]
        self.rows = Rows(keep, to if self.writes else None)
        self.rows.refresh = self.evaluate_samples
        self.padding = Padding(model)
        self.pending: list[Sample] = []
        self._gradients: dict[int, Tensor] = {}
        self.losses = LossMeter()
        self.read_loss = None if isinstance(loss, nn.Module) else loss
        self._parameter_hooks = ExitStack()  # present only during a step that is measured
        self._hooks = ExitStack()
        for handle in self.padding.handles:
            self._hooks.enter_context(handle)
        if isinstance(loss, nn.Module):
            self._hooks.enter_context(loss.register_forward_hook(self._after_criterion))
        self.key = graph_ops.register(self)
        self.ledger = torch.zeros(1, device=next((p.device for p in model.parameters()), None))  # of `graph_ops`
        self.norms = [NormRecorder(self, site, Memory(), index) for index, site in enumerate(found)]
        self.measured: set[str] = set()
        self.measurable = 0  # steps that are due
        self.frozen: set[str] = set()  # norms in evaluation mode in such a step
        self.evaluated = 0  # forwards of the model in evaluation mode, with gradients
        self.trained = self.ungraded = 0  # forwards in training mode with gradients, and without them
        self.has_gradient = False  # one has reached a parameter
        self.unread: Exception | None = None  # of reading a loss
        for norm in self.norms:
            module = norm.site.module
            self._hooks.enter_context(module.register_forward_pre_hook(norm.before, with_kwargs=True))
            if self.needs & BACKWARD:
                self._hooks.enter_context(module.register_forward_hook(norm.after, with_kwargs=True, prepend=True))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recorder":
        return copy.copy(self)  # for the hooks in a copy of the model, as for EMA: they measure nothing

    def __getstate__(self) -> dict[str, Any]:
        """Return what hooks in a saved model need, which measure nothing."""
        return {"model": self.model, "ledger": self.ledger, "key": NO_KEY, "due": False, "active": False}

    # -- steps --------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Count every training forward of the model as a step."""
        self._hooks.enter_context(self.model.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True))
        self._hooks.enter_context(self.model.register_forward_hook(self._after, with_kwargs=True))

    def begin_step(self) -> None:
        """Begin a training step."""
        self._end_step()
        self._is_open = True
        self.step += 1
        self.due = (self.step - 1) % self.every == 0
        self.active = True
        self.padding.real.clear()
        self.losses.of_step = 0
        self.trained += torch.is_grad_enabled()
        self.ungraded += not torch.is_grad_enabled()
        if self.due:
            self.measurable += 1
            self.frozen |= {norm.site.name for norm in self.norms if not norm.site.module.training}
        if self.due and "gradient" in self.needs and self.writes:
            for number, parameter in enumerate(self.model.parameters()):
                if parameter.requires_grad and parameter.is_leaf and not nn.parameter.is_lazy(parameter):
                    hook = functools.partial(self._keep_gradient_norm, number)
                    self._parameter_hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))

    def _end_step(self) -> None:
        if self.read_loss is not None and self._is_open:
            try:
                if (loss := self.read_loss()) is not None:  # a step of several forwards has none at the first
                    self.add_loss(loss)
            except NameError as error:  # the variable is set later
                self.unread = error
        self._is_open = False
        if self.due:
            self.evaluate_samples()
            self._parameter_hooks.close()

    def end_forward(self) -> None:
        """End the forward of a step, to which its backward and what this recomputes still belong."""
        self.active = False

    def _before(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if model.training and self.key != NO_KEY:
            if torch.compiler.is_compiling():
                graph_ops.begin_step(self.ledger, self.key)
                return
            self.begin_step()
            self.padding.take_masks(args, kwargs)
        elif self.key != NO_KEY and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self.evaluated += 1

    def _after(self, model: nn.Module, args: tuple, kwargs: dict[str, Any], output: object) -> None:
        if torch.compiler.is_compiling() or self.key == NO_KEY:
            return
        self.end_forward()
        if model.training and torch.is_grad_enabled() and isinstance(output, Mapping):
            self.losses.add_output(model, output, kwargs)

    def add_loss(self, loss: Tensor | float) -> None:
        """Add the loss of this step."""
        self.losses.add(loss)

    def _after_criterion(self, criterion: nn.Module, args: tuple, output: object) -> None:
        trains = self.model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if self.key != NO_KEY and trains and isinstance(output, Tensor):
            self.losses.add_criterion(criterion, args, output)

    # -- samples ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _keep_gradient_norm(self, number: int, parameter: Tensor) -> None:
        self.has_gradient = True
        if parameter.grad is not None:
            grad = parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad
            wide = torch.promote_types(grad.dtype, torch.float32)
            self._gradients[number] = torch.linalg.vector_norm(grad, dtype=wide)

    @torch.no_grad()
    def evaluate_samples(self) -> None:
        """Turn the samples so far into rows, on the device."""
        whole = self.losses.take() if self.due else {}
        if self._gradients:
            first = next(iter(self._gradients.values())).device  # of a model on several
            norms = torch.stack([norm.to(first, torch.float32) for _, norm in sorted(self._gradients.items())])
            self._gradients.clear()
            whole["gradient"] = norms
        if whole:
            self.pending.append(Sample(self.step, Site("", "", self.model), whole))
        samples, self.pending = self.pending, []
        if self.writes:
            for waiting in evaluate(samples, self.chosen):
                self.rows.add(waiting)

    def close(self, warns: bool = True) -> None:
        """Remove the hooks; the rows stay readable."""
        try:
            self._end_step()
            self.rows.flush()
        finally:  # also if the loss or the file raises an error
            self._hooks.close()
            self._parameter_hooks.close()
            graph_ops.LISTENERS.pop(self.key, None)
            self.due = self.active = False
        if warns:
            self._warn_unseen()

    def _warn_unseen(self) -> None:
        """Warn of forwards and norms that were not measured."""
        if self.evaluated:
            what = f"{self.evaluated} forwards with gradients ran in evaluation mode and were not recorded"
            warn(f"{what}: call model.train() before those that train, and use torch.no_grad() for the others")
        if frozen := [norm.site.name for norm in self.norms if norm.site.name in self.frozen - self.measured]:
            warn(f"norms in evaluation mode while the model trained were not recorded: {listed(frozen, 4)}")
        elif self.measurable and self.norms and self.needs - WHOLE and not self.measured:
            what = f"no norm was recorded in {self.measurable} steps: none ran, or compiled code of this model, or of"
            warn(f"{what} an equal one, was used again; call torch.compiler.reset(), and record from the first forward")
        if self.unread is not None and not self.losses.seen:
            warn(f"loss= could not be read ({self.unread}): pass the module of the loss, or a function that returns it")
        if not (self.step or self.evaluated):
            warn("the recorded model was never called")
        if self.trained and self.ungraded and any(norm.site.stateful for norm in self.norms):
            what = f"{self.ungraded} forwards without gradients ran in training mode, were counted as steps, and moved"
            warn(f"{what} the statistics of norms: if they validate, call model.eval() before")
        watches = self.losses.seen and self.writes and "gradient" in self.needs
        if watches and self.measurable > 1 and not self.has_gradient:
            what = "no gradient reached a parameter in a measured step, unless torch.autograd.grad took it"
            warn(f"{what}: see that backward() is called, that parameters require gradients, and that none is detached")
        known = {id(norm.site.module) for norm in self.norms}
        if self.writes and (new := [each.name for each in sites(self.model) if id(each.module) not in known]):
            warn(f"norms that came into the model while it was recorded were not recorded: {listed(new, 4)}")

    def state(self) -> dict[str, Any]:
        """The state, beside the step, that a resumed recording needs for the same values."""
        self.evaluate_samples()
        return {norm.site.name: norm.memory.state() for norm in self.norms} | {LOSSES: dict(vars(self.losses))}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore from `state`; norms that it does not have start from nothing."""
        vars(self.losses).update({**state.get(LOSSES, {}), "of_step": 0, "seen": False})
        for norm in self.norms:
            if norm.site.name in state:
                norm.memory.load(state[norm.site.name])


class NormRecorder:
    """The two hooks of one norm; what they measure becomes samples of the recorder."""

    def __init__(self, recorder: Recorder, site: Site, memory: Memory, index: int):
        self.recorder, self.site, self.memory, self.index = recorder, site, memory, index
        self.moments: Moments | None = None  # of the input of the forward in progress
        self.waited = False  # for the gradient of an output

    def before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Measure the input, before the norm updates its statistics."""
        if torch.compiler.is_compiling():
            if module.training:
                x, mask = self._given(args, kwargs)
                graph_ops.sample_input(x, mask, self.recorder.ledger, self.recorder.key, self.index)
            return
        self.moments = None
        if self._is_due() and not is_recomputed():  # a repeated forward was measured before
            x, mask = self._given(args, kwargs)
            self.moments = self.sample_input(x, mask) if self.site.can_measure(x) else None

    def after(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], y: Tensor) -> Tensor | None:
        """Measure the gradient of the output, when the backward pass computes it."""
        if torch.compiler.is_compiling():
            if module.training and torch.is_grad_enabled():
                x, mask = self._given(args, kwargs)
                return graph_ops.Tap.apply(y, x, mask, self.recorder.ledger, self.recorder.key, self.index)
            return None
        x, mask = self._given(args, kwargs) if self._is_due() else (None, None)
        if self.site.can_measure(x) and isinstance(y, Tensor) and y.requires_grad and y.shape == x.shape:
            self.waited = True
            step, known, x = self.recorder.step, self.moments, x.detach()
            mask = self.choose_mask(x, mask)  # now: another forward may come before the backward
            y.register_hook(lambda dy: self.sample_gradient(step, x, dy, mask, known))
        self.moments = None
        return None

    @torch.no_grad()
    def sample_input(self, x: Tensor, mask: Tensor | None) -> Moments:
        """Measure the input; return its moments, which `sample_gradient` can use again."""
        mask, x = self.choose_mask(x, mask), self.site.channels_last(x)
        if not x.numel():  # nothing to record, but other processes wait for this one's share
            return moments(x, mask, self.site.module)
        fields = gather(self.site, self.memory, x, mask, self.recorder.padding.mask(x.shape[:-1]))
        if self._lacks_gradient():
            fields["no_gradient"] = x.new_ones(())
        if mask is None and (length := unfit_length(self.site.module)) is not None:
            fields["mask_length"] = x.new_tensor(length)
        self._add(self.recorder.step, fields, "x", fields["quadratic"])
        return fields["mean"], fields["var"], fields["count"]

    @torch.no_grad()
    def sample_gradient(self, step: int, x: Tensor, dy: Tensor, mask: Tensor | None, known: Moments | None) -> None:
        """Measure the gradient of the output; `mask` is that of its forward."""
        x, dy = self.site.channels_last(x), self.site.channels_last(dy)
        fields = gather_gradient(self.site, x, dy, mask, known)
        if x.numel():
            fields["no_gradient"] = self.memory.always_zero("g", fields["dy_square"]).float().mean()
            self._add(step, fields, "g", fields["g_psi2"])

    def choose_mask(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """The mask of a norm; for a per-token one, that of batch statistics in its place."""
        if mask is not None or self.site.stateful:
            return mask
        return self.recorder.padding.mask(self.site.channels_last(x).shape[:-1])

    def _add(self, step: int, fields: Fields, side: str, followed: Tensor) -> None:
        self.recorder.measured.add(self.site.name)
        last = int(getattr(self.site.module, "window", 4))
        fields |= self.memory.windows(side, followed, self.recorder.needs, last)
        self.recorder.pending.append(Sample(step, self.site, fields))

    def _lacks_gradient(self) -> bool:
        """Return True if the norm's weights are trained, and no output has had a gradient."""
        weight = getattr(self.site.module, "weight", None)
        trains = isinstance(weight, Tensor) and weight.requires_grad and self.recorder.has_gradient
        return trains and self.waited and "g" not in self.memory.zero and self.memory.samples > 1

    def _is_due(self) -> bool:
        """Return True in a forward of a due step, also a recomputed one; not under torch.func."""
        recorder = self.recorder
        measured = recorder.due and self.site.module.training and (recorder.active or is_recomputed())
        return measured and not torch._C._are_functorch_transforms_active()

    def _given(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor | None]:
        """The input and the mask that the norm is called with."""
        if isinstance(self.site.module, Norm):
            x, mask = input_and_mask(args, kwargs)
            return x, self.site.module.check(x, mask)
        return args[0] if args else next(iter(kwargs.values())), None


def _check(model: nn.Module, loss: object, every: int) -> None:
    """Check the arguments of a recorder."""
    check_is_model(model, "record")
    require(is_int(every) and every >= 1, "every", every, "a whole number of at least 1")
    allowed = "a module, a function without arguments such as `lambda: loss`, or None"
    require(loss is None or (callable(loss) and not isinstance(loss, type)), "loss", loss, allowed)
    if callable(loss) and not isinstance(loss, nn.Module):
        with suppress(ValueError):  # a signature that is not known
            signature = inspect.signature(loss)
            try:
                signature.bind()
            except TypeError as error:
                raise TypeError(f"loss must be {allowed}; this one takes arguments ({error})") from None
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        sharded = "models with sharded parameters (FSDP2) cannot be recorded; DDP ones can"
        raise ValueError(f"{sharded}. Train this model without recording, or a smaller one with it")
