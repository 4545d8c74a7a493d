"""The operations that norms call; which implementation runs is decided here.

`reference.py` defines what each computes. Norms of tokens call `row_norm`. Norms with batch statistics call
`train_step` in training and `standardize` at inference.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from normkit.kernels import dispatch, layout, native, reference
from normkit.kernels.records import StepStatistics, unpack
from normkit.kernels.rule import NEVER, KernelRule, Rule, State, find_kernel_rule

HALVES = (torch.bfloat16, torch.float16)

# -- per token --------------------------------------------------------------------------------------------------------


def row_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kind: str, eps: float, groups: int = 1
) -> Tensor:  # fmt: skip
    """Normalize each row, or each of `groups` runs of its channels: `reference.row_norm`."""
    has_torch = groups == 1 and (kind == "layer" or (kind == "rms" and bias is None))
    if has_torch and dispatch.has_torch_kernel(x, weight, bias):
        dispatch.count("torch", kind)
        shape = x.shape[-1:]
        return F.layer_norm(x, shape, weight, bias, eps) if kind == "layer" else F.rms_norm(x, shape, weight, eps)
    # PyTorch's kernel of LayerNorm is as fast as ours in float32; in half precision it adds up gradients in their type
    has_native = groups == 1 and (kind in ("rms", "scale") or (kind == "layer" and x.dtype in HALVES))
    wide, name = reference.wide_type(x, weight, bias), "group" if groups > 1 else kind
    found = dispatch.select(x, name, wide, width=x.shape[-1] // groups, has_native=has_native)
    if found == "reference":
        return reference.row_norm(x, weight, bias, kind, eps, groups)
    return reference.NormalizeRows.apply(x, weight, bias, kind, eps, groups, dispatch.module(found))  # type: ignore[return-value]


def group_rms(x: Tensor, eps: float, groups: int) -> Tensor:
    """Divide each of `groups` runs of channels by its root mean square: layer-scale.

    Shen et al. 2020, section 4.2; `GroupScaling1D` in their code. No parameters.
    """
    return row_norm(x.unflatten(-1, (groups, -1)), None, None, "rms", eps).flatten(-2)


# -- norms with batch statistics --------------------------------------------------------------------------------------


def moments(
    x: Tensor, mask: Tensor | None = None, center: bool = False, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Statistics `[k, C]` of the real rows of `x` and their number: `reference.moments`."""
    dtype = x.dtype if dtype is None else dtype
    kind = dispatch.select(x, "moments", dtype, has_native=False)
    return dispatch.module(kind).moments(x, mask, center, dtype)


def standardize(
    x: Tensor, stat: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, groups: int = 0
) -> Tensor:  # fmt: skip
    """Standardize by statistics `[k, C]`, with `groups` after layer-scale: `reference.standardize`."""
    plain = torch.compiler.is_compiling() or torch.is_grad_enabled() or dispatch.is_traced() or not layout.has_rows(x)
    kind = "reference" if plain else dispatch.select(x, "standardize", reference.wide_type(stat, weight, bias))
    if kind == "native":
        return native.standardize(x, stat, weight, bias, eps, groups)
    x = group_rms(x, eps, groups) if groups else x
    return dispatch.module(kind).standardize(x, stat, weight, bias, eps)


def train_step(x: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Normalize a batch by a rule in training, and move its state: `reference.train_step`.

    A forward that activation checkpointing runs again takes the decisions of the first, and moves nothing.

    Args:
        x: `[..., C]`.
        mask: `[...]`, True where a row is real.
        rule: The method; a `StatNorm`.
    """
    compiles = torch.compiler.is_compiling()
    state = rule.state() if compiles else rule.kept_state()
    x, parameters = x.contiguous(), (rule.weight, rule.bias)  # x is kept for the backward pass, too
    wide = torch.promote_types(x.dtype, state.running.dtype)
    if not compiles and _is_as_before(x, parameters, state):
        kind, how = "native", state.kernel_rule
    else:
        kind, how = _choose_step(x, parameters, wide, rule, state, compiles)
    groups = rule.groups if kind == "native" else 0  # C++ applies layer-scale on its way
    x = group_rms(x, rule.eps, rule.groups) if rule.groups and not groups else x
    module, found = dispatch.load_triton() if kind == "triton" else reference, None
    recomputed = not compiles and torch._C._current_graph_task_id() != -1  # as `is_recomputed`, which costs more
    if recomputed:
        with torch.no_grad():
            data = group_rms(x, rule.eps, groups) if groups else x.detach()
            found = state.records.find(data, lambda mask: module.moments(data, mask, rule.center, wide)[0])
        mask = mask if found is None else found.mask
        if how and found is not None and found.packed is None:  # the first forward took the reference
            x, how = group_rms(x, rule.eps, groups) if groups else x, None
            kind = "reference" if kind == "native" else kind
    known = how is not None and found is None and rule.known_in_advance(state)
    if not compiles:
        dispatch.count(kind, "train_step on one reading" if known else "train_step")
    if how:
        plan = dispatch.load_triton().plan(rule, how, x, mask, known) if kind == "triton" else []
        mask = None if mask is None else mask.contiguous()
        y, packed = native.step(x, parameters, mask, rule, state, how, known, plan, groups, found)
        if found is None and state.buffers.get("warmup_end") is not None and rule.known_end(state) == NEVER:
            _measure_drift(rule, unpack(packed, mask, state), state)
        if not recomputed:
            state.records.add_packed(packed, mask, state, y)
        return y
    y, statistics = reference.train_step(x, mask, rule, state, module, wide, found)
    if not (compiles or recomputed):
        state.records.add(statistics, y)
    return y


@torch.no_grad()
def _measure_drift(rule: Rule, made: StepStatistics, state: State) -> None:
    """Follow the drift of an automatic warm-up, which kernels leave to the norm.

    An unusable batch took no step, and counts for nothing.
    """
    state.write(rule.drift_state(made.batch, made.step, state), made.step == state.step)


def _is_as_before(x: Tensor, parameters: tuple[Tensor | None, Tensor | None], state: State) -> bool:
    """True if the last step took the kernels in C++ with these parameters.

    In small models all checks of `_choose_step` would cost as much as the kernels.
    """
    before = state.native_for
    return (
        before is not None
        and before[0] is x.dtype
        and before[1] is parameters[0]
        and before[2] is parameters[1]
        and x.is_cpu
        and type(x) is Tensor
        and x.numel() > 0
        and dispatch.is_plain()
        and dispatch.current_choice() in ("auto", "native")
    )


def _choose_step(
    x: Tensor, parameters: tuple[Tensor | None, Tensor | None], wide: torch.dtype, rule: Rule, state: State,
    compiles: bool,
) -> tuple[str, KernelRule | None]:  # fmt: skip
    """Choose the implementation of a step, and its rule for kernels, None for the reference."""
    _check_training(state, compiles)
    if compiles:
        return "reference", None
    kind = dispatch.choose(x, "train_step", wide)
    how = None if kind == "reference" else find_kernel_rule(rule, state)
    if how and (not native.can_step(x, parameters) or (x.is_cuda and dispatch.is_traced())):
        how = None
    if kind == "native" and not how:
        kind = "reference"
    state.native_for = (x.dtype, *parameters) if kind == "native" and dispatch.is_plain() else None
    return kind, how


def _check_training(state: State, compiles: bool) -> None:
    # the flag itself: before PyTorch 2.12, is_exporting() is True in a graph of torch.compile, too
    if (not compiles and torch._C._is_tracing()) or torch.compiler._is_exporting_flag:  # type: ignore[attr-defined]
        raise RuntimeError("exported and traced graphs lose a norm's training gradient; call model.eval() first")
    if not compiles and (torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0):
        raise RuntimeError(
            "norms with batch statistics do not train under torch.func or in forward mode; call model.eval() first"
        )
    if state.running.dtype in HALVES:
        raise TypeError(f"the statistics are {state.running.dtype}; keep buffers float32 (FSDP: buffer_dtype=None)")
