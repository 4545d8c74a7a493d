"""What a norm is: `rest(x) * scale + shift` at inference; anything it likes while training."""

import collections
import weakref
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from normkit.kernels import channels, rows
from normkit.kernels.async_counter import AsyncCounter
from normkit.kernels.kernel_rule import KernelRule, find_kernel_rule
from normkit.kernels.step_statistics import StepStatistics
from normkit.norms._options import Count, Epsilon, HasOptions, option, option_defaults
from normkit.text import format_spec


class Split(NamedTuple):
    """At inference `norm(x) == rest(x) * scale + shift`; folding, export and inspection need nothing else."""

    rest: nn.Module
    scale: Tensor
    shift: Tensor


class Norm(HasOptions):
    """Base of every norm: normalizes `x[..., dim]`, channels last.

    The output has the shape and the type of `x`; the arithmetic runs in float32 or wider. Parameters are `weight` and
    `bias`, None where switched off. A subclass declares its options as annotated class attributes and creates further
    parameters and buffers in `build()`.

    Args:
        dim: Number of channels, the last axis of `x`.
        eps: Added to a variance or mean square before the root; 1e-5 as in most released code.
        affine: Learn a `weight` (and a `bias`) per channel.
        bias: Learn a `bias`; needs `affine`.

    `mask[...]` is True where a token is real. Norms of single tokens check it and do not use it.
    `convert(mask_from=...)` passes masks by forward hooks; `norm.mask` is a default for callers that cannot pass one.
    """

    offline: ClassVar[bool] = False  # True: statistics are frozen at inference and `rest` is the identity: it folds
    exact_grad: ClassVar[bool] = True  # True: backward is the derivative of the training forward
    batch_free: ClassVar[bool] = True  # True: an output depends on its own token only, in training too

    dim: int = option(kw_only=False)
    eps: Epsilon = 1e-5
    affine: bool = True
    with_bias: bool = option(default=True, alias="bias")

    def build(self) -> None:
        """Create parameters and buffers, from the options in `self`."""
        self.mask: Tensor | None = None
        self.weight: nn.Parameter | None = nn.Parameter(torch.ones(self.weight_shape())) if self.affine else None
        self.bias: nn.Parameter | None = nn.Parameter(torch.zeros(self.dim)) if self.affine and self.with_bias else None

    def weight_shape(self) -> tuple[int, ...]:
        """Return the shape of `weight`: one number per channel."""
        return (self.dim,)

    def gains(self) -> Tensor | None:
        """Return the factors `[dim]` on a token of mean square 1: `weight`, unless a norm stores them otherwise."""
        return self.weight

    def reset_parameters(self) -> None:
        """Set parameters and state to their initial values."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def reset_warmup(self) -> None:
        """Restart the warm-up of statistics before fine-tuning; no effect on norms without statistics."""

    def split(self) -> Split:
        """Return the norm at inference as `Split(rest, scale, shift)`; `scale` and `shift` are `[dim]`."""
        raise NotImplementedError

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Register state, in float32 or wider whatever the default type is."""
        if tensor is not None and tensor.dtype in (torch.float16, torch.bfloat16):
            tensor = tensor.float()
        super().register_buffer(name, tensor, persistent)

    def _apply(self, fn: Any, recurse: bool = True) -> "Norm":
        """Keep state in float32 or wider through `.half()`, `.bfloat16()` and `.to(dtype)`."""
        before = dict(self.named_buffers(recurse=False))
        super()._apply(fn, recurse)
        for name, buffer in self.named_buffers(recurse=False):
            if buffer.dtype in (torch.float16, torch.bfloat16):
                setattr(self, name, before[name].to(buffer.device, torch.float32))
        return self

    @property
    def spec(self) -> str:
        """Name and options that differ from their defaults, as `make` reads them.

        A class derived from a norm of the table has that norm's name and options, any other has its own class name.

        >>> import normkit
        >>> normkit.UN(8, window=2).spec
        'un(window=2)'
        """
        from normkit.norms import NORMS

        names = {kind: name for name, kind in NORMS.items()}
        kind = next((kind for kind in type(self).__mro__ if kind in names), type(self))
        name, defaults = names.get(kind, kind.__name__), option_defaults(kind)
        changed = {key: self.option(key) for key in defaults if self.option(key) != defaults[key]}
        return format_spec(name, changed)

    def option(self, name: str) -> object:
        """Return this norm's value of an option."""
        if name == "bias":
            return self.bias is not None if self.affine else option_defaults(type(self))["bias"]
        return getattr(self, name)

    def extra_repr(self) -> str:
        """Return size and spec."""
        return f"{self.dim}, {self.spec}"

    def __prepare_scriptable__(self) -> None:
        raise TypeError(
            f"torch.jit.script cannot compile {type(self).__name__}, nor any normkit norm. Use torch.compile, "
            "normkit.export, or, for a model in evaluation mode, torch.jit.trace"
        )

    def check(self, x: Tensor, mask: Tensor | None) -> Tensor | None:
        """Return the mask to use, after checking input and mask.

        Raises:
            TypeError: if `x` is no floating-point tensor, or the mask is not boolean.
            ValueError: if the shape or the device does not fit.
        """
        if not isinstance(x, Tensor):
            hint = "; to torch.fx, normkit.norms.Norm is a leaf module" if isinstance(x, torch.fx.Proxy) else ""
            raise TypeError(f"{type(self).__name__} takes a tensor [..., {self.dim}], not {type(x).__name__}{hint}")
        if x.dim() < 1 or x.shape[-1] != self.dim:
            raise ValueError(
                f"{type(self).__name__}(dim={self.dim}) takes x[..., {self.dim}], channels last; got shape "
                f"{tuple(x.shape)}. Build it with dim={x.shape[-1] if x.dim() else '?'}, or move the channels last"
            )
        if not x.dtype.is_floating_point:
            raise TypeError(f"{type(self).__name__} takes floating-point x, not {x.dtype}; convert it first")
        mask = self.mask if mask is None else mask
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"mask must be a boolean tensor, True where a token is real; got {kind}. Use mask.bool()")
        if mask.shape != x.shape[:-1]:
            raise ValueError(
                f"mask must have the shape of x without its channels, {tuple(x.shape[:-1])}; got {tuple(mask.shape)}"
            )
        if mask.device != x.device:
            raise ValueError(f"mask is on {mask.device}, x on {x.device}; move one of them")
        return mask


class RowNorm(Norm):
    """Norm of each token by itself: no state, the same in training and at inference.

    A subclass implements `normalize`.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize `x[..., dim]`; the mask is checked and otherwise unused."""
        return self.normalize(x, self.check(x, mask))

    def normalize(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the normalized `x`, computed in float32 or wider and cast back to `x.dtype`."""
        raise NotImplementedError

    def split(self) -> Split:
        """Return the norm without parameters as `rest`, then the affine part."""
        rest = type(self)(self.dim, **{**{k: self.option(k) for k in option_defaults(type(self))}, "affine": False})
        device = self.weight.device if self.weight is not None else None
        scale = torch.ones(self.dim, device=device) if self.weight is None else self.weight.expand(self.dim)
        return Split(rest, scale, torch.zeros_like(scale) if self.bias is None else self.bias)


class Stat(NamedTuple):
    """Decisions of a method for one training forward."""

    value: Tensor  # [k, C], to standardize with
    state: dict[str, Tensor]  # what its buffers become
    output_scale: Tensor | None = None  # constant factor on the standardized x, forward and backward
    output_shift: Tensor | None = None  # constant added after `output_scale`
    grad_scale: Tensor | None = None  # constant factor on the gradient, backward only
    dx_scale: Tensor | None = None  # constant factor on dx
    saved: tuple[Tensor, ...] = ()  # handed on to grad_stat


class _Record:
    """A plan that lives as long as the graph that it belongs to."""

    def __init__(self, plan: StepStatistics):
        self.plan = plan


class StatNorm(Norm):
    """A norm whose statistics outlive the batch. A method is two rules on `[k, C]` tensors.

    `train_stat` says what to standardize with, `grad_stat` which gradient statistics to remove. Both are pure: they
    read the buffers and return what these become. Everything else is written here, once: masks, which batches count,
    recomputation, several uses in one graph, accumulation, processes.

    Training is not thread-safe: two threads that run forwards of one module lose updates. At inference any number may.

    Buffers: `running [k, C]`, `step` (updates so far), `skipped` and `skipped_grad` (forwards and backwards that moved
    no state because their statistics were not finite or no row was real). A buffer is written by the forward or by
    the backward, never by both: compiled graphs cannot.

    Args:
        dim: Number of channels, the last axis of `x`.
        eps: Added to a variance or mean square before the root; 1e-5 as in most released code.
        affine: Learn a `weight` (and a `bias`) per channel.
        bias: Learn a `bias`; needs `affine`.
        sync: Compute statistics over all processes of the default group; off, as it costs one all-reduce per pass.
        steps_per_update: Training forwards per update of the state, by their joint statistics; set it to the number of
            accumulated batches.
    """

    offline: ClassVar[bool] = True
    batch_free: ClassVar[bool] = False
    center: ClassVar[bool] = False
    pad_grad: ClassVar[str] = "exact"  # gradient statistics sum over "exact"ly all rows, or over "real" ones
    groups = 0  # layer-scale first: so many runs of channels of a token, each divided by its root mean square
    alpha = 0.9  # share of the old value in `average`
    follows_optimizer = False  # new state waits in buffers `next_*` for the optimizer's step (follow_optimizer)

    sync: bool = False
    steps_per_update: Count = 1

    def build(self) -> None:
        super().build()
        k = 1 + self.center
        self.running = nn.Buffer(torch.zeros(k, self.dim))
        self.step = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.skipped = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.skipped_grad = nn.Buffer(torch.zeros((), dtype=torch.long))
        if self.steps_per_update > 1:
            self.micro_step = nn.Buffer(torch.zeros((), dtype=torch.long))
            self.pending = nn.Buffer(torch.zeros(k * self.dim + 1))
            self.micro_step_grad = nn.Buffer(torch.zeros((), dtype=torch.long))
            self.pending_grad = nn.Buffer(torch.zeros(k * self.dim + 1))
        self.running[-1] = 1.0
        self.next_state: dict[str, tuple[str, ...]] = {}  # waiting buffers, by the sums that they belong to
        self._records: list[weakref.ref[_Record]] = []
        self._ungraphed: collections.deque[_Record] = collections.deque(maxlen=16)
        self._steps = AsyncCounter()

    # -- the two rules of a method ----------------------------------------------------------------------------------

    def train_stat(self, batch: Tensor, step: Tensor, count: Tensor) -> Stat:
        """What to standardize with, given the statistics `[k, C]` of this batch of `count` rows, the `step`-th."""
        raise NotImplementedError

    def grad_stat(self, batch: Tensor, step: Tensor, saved: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
        """Gradient statistics `[k, C]` to remove, given this batch's, and what the buffers become.

        Returning them unchanged is the exact gradient.
        """
        return batch, {}

    @property
    def uses_batch_gradient(self) -> bool:
        """Whether what the backward pass removes is always this batch's, of which no record is kept."""
        return type(self).grad_stat is StatNorm.grad_stat

    def known_in_advance(self) -> Tensor | None:
        """What `train_stat` will say to standardize with, where the host knows it before it sees the batch.

        Output and statistics then take one reading of `x`, and the backward pass one of `dy` and `x`. None for most
        methods, and wherever the host would have to wait for the device to know.
        """
        return None

    def grad_known_in_advance(self, saved: tuple[Tensor, ...]) -> Tensor:
        """What `grad_stat` will say to remove, after a forward whose statistics were foretold."""
        raise NotImplementedError

    def kernel_rule(self) -> KernelRule | None:
        """Both rules as kernels know them; None where they do not."""
        return None

    # -- the frame --------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Normalize `x[..., dim]`, by batch and history while training, by `running` otherwise."""
        mask = self.check(x, mask)
        if not self.training:
            usual = type(self).rest is StatNorm.rest and type(self)._affine is StatNorm._affine
            y = channels.infer(self, x) if usual else None
            return channels.multiply_add(self.rest(x), *self._affine()) if y is None else y
        wide = torch.promote_types(x.dtype, self.running.dtype)
        kernels = channels.own(x, wide)
        joined = kernels is not None and kernels.LAYER_SCALE and type(self).rest is StatNorm.rest
        x, groups = (x, self.groups) if joined else (self.rest(x), 0)
        with torch.no_grad():
            plan, y, one_pass = self._replay(x, mask, wide, groups), None, False
            if plan is None:
                plan, y, one_pass = self._advance(x.detach(), mask, wide, groups, kernels is not None)
            plan = _shield(plan) if torch.compiler.is_compiling() else plan
        record = self._remember(plan)
        options = channels.StandardizeOptions(self, mask, groups, one_pass, y)
        y = channels.Standardize.apply(x, self.weight, self.bias, plan, options)
        if record is not None and y.grad_fn is not None:
            y.grad_fn.record = record  # type: ignore[attr-defined]
        return y

    def rest(self, x: Tensor) -> Tensor:
        """What is done to each token first, in training and at inference: layer-scale, or nothing."""
        return rows.group_rms(x, self.eps, self.groups) if self.groups else x

    def _advance(
        self, x: Tensor, mask: Tensor | None, wide: torch.dtype, groups: int, kernels: bool
    ) -> tuple[StepStatistics, Tensor | None, bool]:
        """Look at the batch, let the method decide, move the state once; the output, where kernels have written it, and
        whether the statistics were foretold.
        """
        known_in_advance, y = self.known_in_advance() if kernels else None, None
        if kernels and x.numel() and (kernel_rule := find_kernel_rule(self)):
            y, plan = channels.train(self, kernel_rule, x, mask, known_in_advance, groups)
            return plan, y, known_in_advance is not None
        if known_in_advance is None:
            local, count = channels.moments(x, mask, self.center, wide, groups, self.eps)
        else:
            y, local, count = channels.standardize_and_moments(
                x, known_in_advance, self.eps, self.center, self.weight, self.bias, mask, groups
            )
        batch = local
        if self.sync:
            batch, count = channels.unpack(channels.all_reduce(channels.pack(local, count, self.running)), self.running)
        ok = usable(batch, count)
        batch = torch.where(ok, batch, self.running.to(batch.dtype))  # a batch that says nothing: the past stands in
        step = self.step + 1
        stat = self.train_stat(batch, step, count)
        state, moved = stat.state, ok
        if self.accumulates:
            joint, joint_count, moved = self._accumulate("", channels.pack(batch, count, self.running), ok)
            joint, joint_count = channels.unpack(joint, self.running)
            state = self.train_stat(joint, step, joint_count).state
        self._commit({**state, "step": step}, moved)
        self.skipped.add_(~ok)
        plan = StepStatistics(
            local,
            stat.value,
            count,
            step,
            stat.output_scale,
            stat.output_shift,
            stat.grad_scale,
            stat.dx_scale,
            stat.saved,
        )
        return plan, y, known_in_advance is not None

    @torch.no_grad()
    def take_gradient(self, batch: Tensor, count: Tensor, step: Tensor, saved: tuple[Tensor, ...]) -> Tensor:
        """Gradient statistics to remove from `dx`, given this batch's `[k, C]`; moves the state once."""
        value, state = self.grad_stat(batch, step, saved)
        if not state:
            return value
        ok = moved = usable(batch, count)
        if self.accumulates:
            sums = torch.cat([(batch * count).flatten(), count.view(1)])
            sums, total, moved = self._accumulate("_grad", sums, ok)
            state = self.grad_stat(sums[:-1].view_as(batch) / total.clamp(min=1), step, saved)[1]
        self._commit(state, moved)
        self.skipped_grad.add_(~ok)
        return value

    @property
    def accumulates(self) -> bool:
        """Whether several batches together move the state."""
        return self.steps_per_update > 1 or self.follows_optimizer

    def _accumulate(self, side: str, sums: Tensor, ok: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add `sums` to those pending; return the joint sums, their count, and whether the state moves now."""
        pending = getattr(self, f"pending{side}")
        joint = torch.where(ok, pending + sums, pending)
        if self.follows_optimizer:
            pending.copy_(joint)
            return joint, joint[-1], ok
        micro_step = getattr(self, f"micro_step{side}")
        ends = (micro_step + 1) % self.steps_per_update == 0
        moved = ends & (joint[-1] > 0)
        pending.copy_(torch.where(ends, 0, joint))
        micro_step.add_(1)
        return joint, joint[-1], moved

    def _commit(self, state: dict[str, Tensor], moved: Tensor) -> None:
        for name, new in state.items():
            old = getattr(self, f"next_{name}" if self.follows_optimizer else name)
            old.copy_(torch.where(moved, new, old))

    def average(self, batch: Tensor) -> Tensor:
        """The running statistics after this batch: `alpha * running + (1 - alpha) * batch`."""
        return self.running.lerp(batch.to(self.running.dtype), 1 - self.alpha)

    def _affine(self) -> tuple[Tensor, Tensor]:
        """Inference as `x * scale + shift`, both `[dim]`."""
        scale = torch.rsqrt(self.running[-1] + self.eps)
        shift = -self.running[0] * scale if self.center else torch.zeros_like(scale)
        if self.weight is not None:
            scale, shift = scale * self.weight, shift * self.weight
        return scale, shift if self.bias is None else shift + self.bias

    def split(self) -> Split:
        """`Split(identity, scale, shift)`, from the running statistics."""
        return Split(nn.Identity(), *self._affine())

    # -- recomputation (activation checkpointing): a forward that runs inside a backward decides what it decided ------

    def _remember(self, plan: StepStatistics) -> _Record | None:
        if torch.compiler.is_compiling() or inside_backward():
            return None
        record = _Record(plan)
        if torch.is_grad_enabled():
            self._records = [r for r in self._records if r() is not None]
            self._records.append(weakref.ref(record))
        else:  # reentrant checkpointing runs its first forward without a graph to hang the record on
            self._ungraphed.append(record)
        return record

    def _replay(self, x: Tensor, mask: Tensor | None, wide: torch.dtype, groups: int) -> StepStatistics | None:
        if torch.compiler.is_compiling() or not inside_backward():
            return None
        alive = [record for ref in self._records if (record := ref()) is not None]
        plans = [record.plan for record in [*self._ungraphed, *alive]][::-1]
        if len(plans) < 2:
            return plans[0] if plans else None
        # several forwards are waiting: the one with this batch's statistics, found without asking the device
        batch = channels.moments(x.detach(), mask, self.center, wide, groups, self.eps)[0]
        distance = torch.stack([(plan.batch - batch).abs().sum() for plan in plans])
        best = distance.nan_to_num(nan=0.0).argmin().view(1)
        columns = zip(*(plan.tensors() for plan in plans), strict=True)
        return StepStatistics.from_tensors(
            [None if c[0] is None else torch.stack(c).index_select(0, best)[0] for c in columns]
        )

    # -- state --------------------------------------------------------------------------------------------------------

    def reset_parameters(self) -> None:
        """Parameters, running statistics, windows and counters as at the start."""
        super().reset_parameters()
        with torch.no_grad():
            for buffer in self.buffers(recurse=False):
                buffer.zero_()
            self.running[-1] = 1.0
        self._steps = AsyncCounter()

    def reset_warmup(self) -> None:
        """Start the warm-up anew, before fine-tuning: counters and gradient statistics to zero, `running` stays."""
        for name, buffer in self.named_buffers(recurse=False):
            if name != "running":
                buffer.zero_()
        self._steps = AsyncCounter()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for name in ("pending", "pending_grad", "micro_step", "micro_step_grad"):  # steps_per_update may have changed
            buffer = self._buffers.get(name)
            if buffer is not None and name not in self._non_persistent_buffers_set:
                state_dict.setdefault(prefix + name, torch.zeros_like(buffer))
                continue
            state_dict.pop(prefix + name, None)
            if buffer is not None:
                buffer.zero_()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self._steps = AsyncCounter()

    def __getstate__(self) -> dict[str, Any]:
        """A copy of the module takes no memory of forwards that it did not make."""
        return {
            **super().__getstate__(),
            "_records": [],
            "_ungraphed": collections.deque(maxlen=16),
            "_steps": AsyncCounter(),
        }


def push(window: Tensor, step: Tensor, entry: Tensor) -> Tensor:
    """The window `[M, ...]` with `entry` in the slot of this step, `step % M`."""
    slots = torch.arange(len(window), device=window.device).view(-1, *[1] * entry.dim())
    return torch.where(slots == step % len(window), entry, window)


def usable(batch: Tensor, count: Tensor) -> Tensor:
    """Whether every statistic is finite (inf - inf and nan - nan are nan) and some row was real, without a sync."""
    return ((batch - batch) == 0).all() & (count > 0)


def inside_backward() -> bool:
    """Whether this forward is a recomputed one, run by a backward pass."""
    return torch._C._current_graph_task_id() != -1


def _shield(plan: StepStatistics) -> StepStatistics:
    """The plan in copies that a compiled backward pass will not recompute from overwritten buffers."""
    tensors = plan.tensors()
    copies = iter(channels.snapshot([t for t in tensors if t is not None]))
    return StepStatistics.from_tensors([None if t is None else next(copies) for t in tensors])
