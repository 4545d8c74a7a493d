"""Rules of linear operations: products with a weight, sums, multiples, averages.

Each rule returns True where it applies to a call; elsewhere the operation is a reader like any other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.fold.trace import (
    FOREIGN,
    ZERO,
    Source,
    channel_pairs,
    channel_rows,
    everywhere,
    joined,
    varying,
)

if TYPE_CHECKING:
    from normkit.fold.tracer import Tracer

aten = torch.ops.aten


def _matmul(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """A product with a matrix on either side, or with one a group (experts, heads)."""
    bias, x, weight = args[:3] if packet is aten.addmm else (None, *args[:2])
    if packet is aten.linear:
        bias, weight = args[2] if len(args) > 2 else None, weight.t()
    shadow, places = tracer.origins(x), [-1]
    if packet in (aten.mm, aten.bmm) and tracer._parameter(weight) is None:
        x, weight, shadow, places = weight, x.transpose(-2, -1), tracer.origins(weight).mT, [-2]
    plain = weight.dim() > 1 and 0 not in weight.stride() and kwargs.get("alpha", 1) == kwargs.get("beta", 1) == 1
    if tracer._parameter(weight) is None or tracer._parameter(x) is not None or not plain:
        return False
    if packet is aten.bmm:
        part, rows, places = weight[:, :, None], shadow.movedim(1, 0).flatten(1), [0, *places]
    else:
        part, rows = weight[None, :, None], channel_rows(shadow, -1)
    return tracer.product("matmul", part, bias, rows, out, *places)


def _convolution(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    x, weight, bias, _, padding, _, transposed, _, groups = args[:9]
    if not weight.is_contiguous():
        return False
    kernels = weight.view(groups, len(weight) // groups, weight.shape[1], -1)
    part = kernels.permute(0, 1, 3, 2) if transposed else kernels.permute(0, 2, 3, 1)
    rows = channel_rows(tracer.origins(x), 1)
    if transposed or any(padding):  # outputs read different parts of the kernel
        rows = torch.cat([rows, torch.zeros_like(rows[:1])])
    return tracer.product("convolution", part, bias, rows, out, 1)


def _embedding(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    weight = args[0]
    return weight.is_contiguous() and tracer.product("embedding", weight[None, :, None], None, None, out, -1)


def _sum(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """Sums and differences; a bias that is added separately belongs to its product."""
    a, b = args[0], args[1]
    if isinstance(a, Tensor) and isinstance(b, int | float) and b == 0 and tracer.shadow(a) is not None:
        tracer.shadows[out] = tracer.shadow(a)  # Python's sum() begins with 0
        return True
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    factor = float(kwargs.get("alpha", 1)) * (-1 if packet in (aten.sub, aten.sub_) else 1)
    if factor == 1 and (_add_bias(tracer, a, b, out) or _add_bias(tracer, b, a, out)):
        return True
    shadows = [tracer.origins(t).expand(out.shape) for t in (a, b)]
    dim = next((axis for shadow in shadows if (axis := _channel_axis(shadow, out)) is not None), None)
    if dim is None:
        return False
    terms = [(channel_pairs(shadow, dim), by) for shadow, by in zip(shadows, (1.0, factor), strict=True)]
    return _combine(tracer, [a, b], terms, out, dim)


def _scaled(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """A followed tensor times a number, a parameter per channel, or a computed tensor."""
    a, b = args[1::-1] if packet is aten.mul and tracer.shadow(args[0]) is None else args[:2]  # also `alpha * x`
    if isinstance(b, Tensor) and (b.numel() != 1 or tracer._parameter(b) is None):  # a number of this call, perhaps
        sides = ((a, b), (b, a)) if packet is aten.mul else ((a, b),)
        rules = (_layer_scale, _modulated) if packet is aten.mul else (_modulated,)
        return any(rule(tracer, x, by, out) for rule in rules for x, by in sides)
    dim = _channel_axis(tracer.shadow(a), out) if isinstance(a, Tensor) else None
    if dim is None or not isinstance(b, Tensor | int | float) or float(b) == 0 or kwargs.get("rounding_mode"):
        return False
    factor = 1 / float(b) if packet in (aten.div, aten.div_) else float(b)
    return _combine(tracer, [a], [(channel_pairs(tracer.origins(a), dim), factor)], out, dim)


def _layer_scale(tracer: "Tracer", x: Tensor, gain: Tensor, out: Tensor) -> bool:
    """`x * gain` with a parameter that has one number per channel."""
    dim = _channel_axis(tracer.shadow(x), out)
    known = tracer._parameter(gain) is not None and tracer.shadow(gain) is not None
    if not known or dim is None or gain.numel() != out.shape[dim] or gain.expand(out.shape).stride(dim) == 0:
        return False
    return tracer.product("gain", gain.view(-1, 1, 1, 1), None, channel_rows(tracer.origins(x), dim), out, dim)


def _modulated(tracer: "Tracer", x: Tensor, factor: Tensor, out: Tensor) -> bool:
    """`x` times a computed tensor (a mask, a gate, a modulation): it passes gains only."""
    dim = _channel_axis(tracer.shadow(x), out)
    if dim is None or tracer._parameter(factor) is not None:
        return False
    sources = [{source.kind for source, _ in tracer.trace.by_code(tracer.origins(t))} for t in (x, factor)]
    if sources[1] and ["norm" in kinds for kinds in sources] != [True, False]:  # of two, that of a norm passes its gain
        return False
    tracer.note_reader(factor, "aten.mul")
    return _combine(tracer, [x], [(_or_zero(channel_pairs(tracer.origins(x), dim)), 1.0)], out, dim)


def _index_add(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """Rows added to rows of another tensor, as experts add theirs: they have no shift.

    What several experts add one after the other is one sum.
    """
    into, axis, _, rows = args
    dim = _channel_axis(tracer.shadow(rows), rows)
    if dim is None or (dim - axis) % out.dim() == 0 or kwargs.get("alpha", 1) != 1:
        return False
    before, added = channel_pairs(tracer.origins(into), dim), _or_zero(channel_pairs(tracer.origins(rows), dim))
    known = next((source for source in tracer.gathered if torch.equal(before, _own_pairs(source))), None)
    if known is None:
        _combine(tracer, [into, rows], [(before, 1.0), (added, 1.0)], out, dim)
        tracer.gathered.update(source for source, _ in tracer.trace.by_code(tracer.origins(out)))
        return True
    known.terms[1] = (joined(known.terms[1][0], added), 1.0)
    tracer.note_reader(rows, known)
    tracer.shadows[out] = tracer.shadow(into)
    return True


def _own_pairs(source: Source) -> Tensor:
    """The pairs (code, channel) of a tensor that holds a source."""
    return torch.stack([source.codes, torch.arange(source.size)], 1).double()


def _index_put(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """Rows written over rows of another tensor: both have the same coordinates."""
    into, indices, rows = args[:3]
    before, written = tracer.shadow(into), tracer.shadow(rows)
    axes = sum(index.dim() if index is not None and index.dtype is torch.bool else 1 for index in indices)
    if any(args[3:4]) or axes >= out.dim() or rows.shape[-1:] != out.shape[-1:]:
        return False
    if before is None or written is None or not is_channel_axis(written, -1):
        return False
    pairs = torch.cat([channel_pairs(before, -1), channel_pairs(written, -1)]).unique(dim=0)
    return _combine(tracer, [into, rows], [(pairs, 1.0)], out, -1)


def _masked_scatter(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """Rows written over whole rows where a mask is true, as those of an image over its tokens."""
    into, mask, rows = args
    if into.shape != out.shape or (mask.dim() and mask.shape[-1] > 1 and mask.stride(-1) != 0):
        return False
    return _index_put(tracer, packet, (into, [mask.expand(out.shape)[..., 0]], rows), {}, out)


def _picked(tracer: "Tracer", packet: Any, args: tuple, out: Tensor) -> bool:
    """Elements that differ, picked by an index: another call may pick any of them."""
    x, shadow = args[0], tracer.origins(args[0])
    indices = args[1] if packet is aten.index else [*[None] * (args[1] % x.dim()), args[2]]
    axis, axes = next(k for k, index in enumerate(indices) if index is not None), len(indices)
    axes += sum(index.dim() - 1 for index in indices if index is not None and index.dtype is torch.bool)
    constant = all(index is None or tracer._parameter(index) is not None for index in indices)
    if constant or all(bool((shadow == shadow.narrow(k, 0, 1)).all()) for k in range(axis, axes)):
        return False
    if axes < x.dim() and out.shape[-1] == x.shape[-1] and is_channel_axis(shadow, -1):
        return _combine(tracer, [x], [(channel_pairs(shadow, -1), 1.0)], out, -1)
    tracer.note_reader(x, f"aten.{packet.__name__}, which other inputs may give another index")
    return False


def _masked(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """`where` and `masked_fill`: another call may replace any element that this one keeps."""
    one, other = args[1:] if packet is aten.where else args[::2]
    if not any(isinstance(t, Tensor) and tracer.shadow(t) is not None for t in (one, other)):
        return False
    by = tracer.origins(other) if isinstance(other, Tensor) else everywhere(FOREIGN if other else ZERO, out.shape)
    a, b = (varying(t.expand(out.shape)) for t in (tracer.origins(one), by))
    for tensor in (t for t in (one, other) if isinstance(t, Tensor) and tracer.shadow(t) is None):
        tracer.note_weight_reader(tensor, packet.__name__)
    high, low = torch.maximum(a, b), torch.minimum(a, b)
    shadow = torch.where(high > ZERO, high, low)
    for source, _ in tracer.trace.by_code(high):
        here = (high >= source.base) & (high < source.base + source.size)
        masked = tracer.trace.source(("masked", tracer.module, source.base), "sum", tracer.module, source.size)
        pairs = torch.stack([torch.cat([high[here], low[here]]), (high[here] - source.base).repeat(2)], 1)
        masked.terms = [(joined(masked.terms[0][0] if masked.terms else None, pairs.unique(dim=0)), 1.0)]
        for part, codes in tracer.trace.by_code(pairs[:, 0]):
            part.note_reader(masked, codes)
        shadow[here] += masked.base - source.base
    tracer.shadows[out] = shadow.expand(out.shape)
    return True


def _padded(tracer: "Tracer", packet: Any, args: tuple, out: Tensor) -> bool:
    """Padding by nothing, which at another size may be by some numbers."""
    shadow, axes = tracer.origins(args[0]), range(-len(args[1]) // 2, 0)
    dim = next((axis for axis in (-1, *range(1, out.dim())) if is_channel_axis(shadow, axis)), None)
    if not tracer.trace.resizable or any(args[1]) or dim is None or {*axes} <= {dim}:
        return False
    pairs = _or_zero(channel_pairs(shadow, dim), FOREIGN if any(args[2:]) else ZERO)
    return _combine(tracer, [args[0]], [(pairs, 1.0)], out, dim)


def _or_zero(pairs: Tensor, other: float = ZERO) -> Tensor:
    """Pairs (code, channel), and zeros at the same channels (no shift), or another code."""
    return torch.cat([torch.stack([torch.full_like(pairs[:, 0], other), pairs[:, 1]], 1), pairs])


def _average(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """Averages and sums over positions, pooling, resizing: all pass a gain, averages a shift."""
    x = args[0]
    shadow = tracer.shadow(x)
    if shadow is None or out.dim() < 2 or kwargs.get("dtype") not in (None, x.dtype):
        return False
    resizes = packet in POSITIONS
    reduced = [] if resizes or len(args) < 2 else [d % x.dim() for d in args[1] or ()]
    if not (resizes or reduced):
        return False
    axes = [x.dim() - 1 - POSITIONS[packet]] if resizes else [d for d in (x.dim() - 1, 1) if d not in reduced]
    channel = next((d for d in axes if is_channel_axis(shadow, d)), None)
    if channel is None:
        return False
    dim = channel if out.dim() == x.dim() else channel - sum(d < channel for d in reduced)
    pairs = channel_pairs(shadow, channel)
    if packet is aten.sum or (packet in POOLS and _counts_padding(args)):
        pairs = _or_zero(pairs)
    return _combine(tracer, [x], [(pairs, 1.0)], out, dim)


def _counts_padding(args: tuple) -> bool:
    """True if a pooling counts the zeros of its padding, or divides by another number."""
    padding, _, include, divisor = (*args[3:7], *(0, False, True, None)[len(args[3:7]) :])
    return divisor is not None or bool(include and (any(padding) if isinstance(padding, list | tuple) else padding))


def _restride(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """New strides for axes of length one, as pooling writes them; no element moves."""
    x, size, stride = args[:3]
    shadow = tracer.shadow(x)
    if shadow is None or len(args) > 3 or tuple(size) != tuple(shadow.shape):
        return False
    return all(old == new for n, old, new in zip(size, tracer.stride_before, stride, strict=True) if n > 1)


def _combine(tracer: "Tracer", parts: list[Tensor], terms: list[tuple[Tensor, float]], out: Tensor, dim: int) -> bool:
    """Make `out` a source of its own, a sum of `terms`: pairs (code, channel) and a factor."""
    parents = tuple(tuple(source.base for source, _ in tracer.trace.by_code(pairs[:, 0])) for pairs, _ in terms)
    key = ("sum", tracer.module, parents, tuple(factor for _, factor in terms), out.shape[dim])
    source = tracer.trace.source(key, "sum", tracer.module, out.shape[dim])
    known = [pairs for pairs, _ in source.terms] or [None] * len(terms)
    source.terms = [(joined(old, pairs), factor) for old, (pairs, factor) in zip(known, terms, strict=True)]
    for part in parts:
        tracer.note_reader(part, source)
        if tracer.shadow(part) is None:
            tracer.note_weight_reader(part, "a sum")
    if out is parts[0]:  # in place
        tracer._forget(out)
    tracer.mark(out, source, dim)
    return True


def _add_bias(tracer: "Tracer", x: Tensor, bias: Tensor, out: Tensor) -> bool:
    """Note `x + bias`, where `x` is the output of a product and `bias` the bias of its layer."""
    shadow, parameter = tracer.shadow(x), tracer._parameter(bias)
    if shadow is None or parameter is None or bias.dim() != 1 or shadow.shape != out.shape:
        return False
    found = list(tracer.trace.by_code(shadow))
    product = found[0][0].product if len(found) == 1 else None
    if product is None or not product.takes_bias:
        return False
    layers = {name for name, _ in tracer.trace.owners[product.view.parameter]}
    added = tracer.bias(bias, product.view.outputs)
    if added is None or not layers & {name for name, _ in tracer.trace.owners[parameter]}:
        return False
    if tracer.trace.biases.setdefault(product, added) != added:
        return False
    tracer.shadows[out] = shadow
    return True


def _channel_axis(shadow: Tensor | None, of: Tensor) -> int | None:
    """The axis of the channels in the shadow of a tensor, or of one broadcast to it."""
    if shadow is None or shadow.shape != of.shape or of.dim() < 2:
        return None
    return next((axis for axis in (-1, 1) if is_channel_axis(shadow, axis)), None)


def is_channel_axis(shadow: Tensor, dim: int) -> bool:
    """True if every channel that is followed is at one index of an axis."""
    rows = channel_rows(shadow, dim)
    if shadow.dim() > 1 and bool((rows == rows[:1]).all()) and bool((rows[0] > ZERO).all()):
        return True
    codes, counts = channel_pairs(shadow, dim)[:, 0].unique(return_counts=True)
    return bool((codes > ZERO).any()) and bool((counts[codes > ZERO] == 1).all())


MOVE_RULES: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys((aten.index, aten.index_select, aten.gather), _picked),
    aten.constant_pad_nd: _padded,
}
POOLS = (aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
POSITIONS = {  # pooling and resizing: axes after the channels
    aten.avg_pool1d: 1, aten.upsample_nearest1d: 1, aten._upsample_nearest_exact1d: 1, aten.upsample_linear1d: 1,
    aten.avg_pool2d: 2, aten._adaptive_avg_pool2d: 2, aten.upsample_nearest2d: 2, aten._upsample_nearest_exact2d: 2,
    aten.upsample_bilinear2d: 2, aten._upsample_bilinear2d_aa: 2, aten.upsample_bicubic2d: 2,
    aten._upsample_bicubic2d_aa: 2, aten.avg_pool3d: 3, aten._adaptive_avg_pool3d: 3, aten.upsample_nearest3d: 3,
    aten._upsample_nearest_exact3d: 3, aten.upsample_trilinear3d: 3,
}  # fmt: skip
RULES: dict[Any, Callable[..., bool]] = {
    **dict.fromkeys((aten.mm, aten.addmm, aten.bmm, aten.linear), _matmul),
    aten.convolution: _convolution,
    aten.embedding: _embedding,
    **dict.fromkeys((aten.add, aten.add_, aten.sub, aten.sub_), _sum),
    **dict.fromkeys((aten.mul, aten.mul_, aten.div, aten.div_), _scaled),
    **dict.fromkeys((aten.mean, aten.sum, *POSITIONS), _average),
    **dict.fromkeys((aten.index_add, aten.index_add_), _index_add),
    **dict.fromkeys((aten.index_put, aten.index_put_), _index_put),
    **dict.fromkeys((aten.masked_scatter, aten.masked_scatter_), _masked_scatter),
    **dict.fromkeys((aten.where, aten.masked_fill), _masked),
    aten.as_strided_: _restride,
}
