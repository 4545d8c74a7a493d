"""Rules of linear operations: products with a weight, sums, multiples, averages.

Each rule returns True where it applies to a call; elsewhere the operation is a reader like any other.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normkit.transforms.fold.trace import ZERO, View, channel_pairs, channel_rows

if TYPE_CHECKING:
    from normkit.transforms.fold.tracer import Tracer

aten = torch.ops.aten


def _matmul(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    bias, x, weight = (args[0], args[1], args[2]) if packet in (aten.addmm, aten.baddbmm) else (None, args[0], args[1])
    if kwargs.get("alpha", 1) != 1 or kwargs.get("beta", 1) != 1:
        return False
    parameter = tracer._parameter(weight)
    if parameter is None or tracer._parameter(x) is not None:
        return False
    if packet is aten.linear:
        bias = args[2] if len(args) > 2 else None
        weight = weight.t()
    if weight.dim() == 2:
        stride = (0, weight.stride(0), 0, weight.stride(1))
        view = View(parameter, (1, weight.shape[0], 1, weight.shape[1]), stride, weight.storage_offset())
        shadow = tracer.shadow(x)
        rows = None if shadow is None else channel_rows(shadow, -1)
        return tracer.product("matmul", view, bias, rows, out, -1)
    return False


def _convolution(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    x, weight, bias, _, padding, _, transposed, _, groups = args[:9]
    parameter = tracer._parameter(weight)
    if parameter is None or transposed or not weight.is_contiguous():
        return False
    outputs, inputs, positions = weight.shape[0] // groups, weight.shape[1], weight[0, 0].numel()
    stride = (outputs * weight.stride(0), weight.stride(1), 1, weight.stride(0))
    view = View(parameter, (groups, inputs, positions, outputs), stride, weight.storage_offset())
    shadow = tracer.shadow(x)
    rows = None
    if shadow is not None:
        rows = channel_rows(shadow, 1)
        if any(padding):
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
    return tracer.product("convolution", view, bias, rows, out, 1)


def _embedding(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    weight = args[0]
    parameter = tracer._parameter(weight)
    if parameter is None or not weight.is_contiguous():
        return False
    view = View(
        parameter, (1, weight.shape[0], 1, weight.shape[1]), (0, weight.stride(0), 0, 1), weight.storage_offset()
    )
    return tracer.product("embedding", view, None, None, out, -1)


def _sum(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """Sums and differences; a bias that is added separately belongs to its product."""
    a, b = args[0], args[1]
    if isinstance(a, Tensor) and isinstance(b, int | float) and b == 0 and tracer.shadow(a) is not None:
        tracer.shadows[out] = tracer.shadow(a)  # Python's sum() begins with 0
        return True
    if kwargs.get("alpha", 1) != 1 or not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    minus = packet in (aten.sub, aten.sub_)
    for x, bias in () if minus else ((a, b), (b, a)):
        if _add_bias(tracer, x, bias, out):
            return True
    shadows = [tracer.shadow(a), tracer.shadow(b)]
    if all(s is None for s in shadows) or out.dim() < 2:
        return False
    shadows = [None if s is None else s.expand(out.shape) for s in shadows]
    dim = next((d for s in shadows if s is not None for d in (-1, 1) if is_channel_axis(s, d)), None)
    if dim is None:
        return False
    pairs = [None if s is None else channel_pairs(s, dim) for s in shadows]
    terms = [None if p is None else (p, factor) for p, factor in zip(pairs, (1.0, -1.0 if minus else 1.0), strict=True)]
    return _combine(tracer, [a, b], terms, out, dim, packet in (aten.add_, aten.sub_))


def _scaled(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """A followed tensor times a number, or times a parameter per channel."""
    a, b = args[0], args[1]
    number = b.numel() == 1 and tracer.shadow(b) is None if isinstance(b, Tensor) else isinstance(b, int | float)
    if not number:
        sides = ((a, b), (b, a)) if packet is aten.mul else ((a, b),)
        rules = (_layer_scale, _each_position) if packet is aten.mul else (_each_position,)
        written = packet in (aten.mul_, aten.div_)
        return isinstance(b, Tensor) and any(rule(tracer, x, by, out, written) for rule in rules for x, by in sides)
    factor = float(b)
    if packet in (aten.div, aten.div_):
        if factor == 0 or kwargs.get("rounding_mode") is not None:
            return False
        factor = 1 / factor
    shadow = tracer.shadow(a) if isinstance(a, Tensor) else None
    if shadow is None or shadow.shape != out.shape or factor == 0 or out.dim() < 2:
        return False
    dim = next((d for d in (-1, 1) if is_channel_axis(shadow, d)), None)
    if dim is None:
        return False
    return _combine(tracer, [a], [(channel_pairs(shadow, dim), factor)], out, dim, packet in (aten.mul_, aten.div_))


def _layer_scale(tracer: "Tracer", x: Tensor, gain: Tensor, out: Tensor, written: bool) -> bool:
    """`x * gain` with a parameter that has one number per channel."""
    shadow, codes = tracer.shadow(x), tracer.shadow(gain)
    if shadow is None or codes is None or shadow.shape != out.shape or out.dim() < 2:
        return False
    dim = next((d for d in (-1, 1) if is_channel_axis(shadow, d)), None)
    if dim is None or not _only_along(codes.expand(out.shape), dim):
        return False
    pairs = channel_pairs(codes.expand(out.shape), dim)
    tables = [source for source, _ in tracer.trace.by_code(pairs[:, 0])]
    if len(tables) != 1 or tables[0].kind != "table" or len(pairs[:, 0].unique()) != out.shape[dim]:
        return False
    return _combine(tracer, [x, gain], [(channel_pairs(shadow, dim), 1.0)], out, dim, False, pairs[:, 0])


def _each_position(tracer: "Tracer", x: Tensor, factor: Tensor, out: Tensor, written: bool) -> bool:
    """`x` times a number for each position, such as a mask: it passes gains, no shift."""
    shadow = tracer.shadow(x) if isinstance(x, Tensor) else None
    if shadow is None or tracer.shadow(factor) is not None or tracer._parameter(factor) is not None:
        return False
    dim = next((d for d in (-1, 1) if shadow.shape == out.shape and is_channel_axis(shadow, d)), None)
    if dim is None or out.dim() < 2 or factor.view((1,) * (out.dim() - factor.dim()) + factor.shape).shape[dim] != 1:
        return False
    return _combine(tracer, [x], [(_or_zero(channel_pairs(shadow, dim)), 1.0)], out, dim, written)


def _index_add(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """Rows added to rows of another tensor, as experts add theirs: they have no shift."""
    into, axis, _, rows = args
    before, added = tracer.shadow(into), tracer.shadow(rows)
    if added is None or out.dim() < 2:
        return False
    dim = next((d for d in (-1, 1) if is_channel_axis(added, d)), None)
    if dim is None or (dim - axis) % out.dim() == 0 or kwargs.get("alpha", 1) != 1:
        return False
    terms = [None if before is None else (channel_pairs(before, dim), 1.0), (_or_zero(channel_pairs(added, dim)), 1.0)]
    return _combine(tracer, [into, rows], terms, out, dim, packet is aten.index_add_)


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
    return _combine(tracer, [into, rows], [(pairs, 1.0)], out, -1, packet is aten.index_put_)


def _or_zero(pairs: Tensor) -> Tensor:
    """Pairs (code, channel), and zeros at the same channels, which allow no shift."""
    return torch.cat([torch.stack([torch.zeros(len(pairs)).double(), pairs[:, 1]], 1), pairs])


def _average(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """Averages and sums over positions, pooling, resizing: all pass a gain, averages a shift."""
    x = args[0]
    shadow = tracer.shadow(x)
    if shadow is None or out.dim() < 2 or kwargs.get("dtype") not in (None, x.dtype):
        return False
    if packet in (aten.mean, aten.sum):
        dims = args[1] if len(args) > 1 else None
        reduced = sorted(d % x.dim() for d in dims or ())
        channel = next((d for d in (x.dim() - 1, 1) if d not in reduced and is_channel_axis(shadow, d)), None)
        if not reduced or channel is None:
            return False
        dim = channel if out.dim() == x.dim() else channel - sum(d < channel for d in reduced)
    else:
        channel = dim = x.dim() - {aten.avg_pool1d: 2, aten.avg_pool3d: 4}.get(packet, 3)
        if packet in (aten.upsample_nearest1d, aten.upsample_linear1d, aten._adaptive_avg_pool2d):
            channel = dim = x.dim() - (3 if packet is aten._adaptive_avg_pool2d else 2)
        if not is_channel_axis(shadow, channel):
            return False
    pairs = channel_pairs(shadow, channel)
    if packet is aten.sum or (packet in POOLS and _counts_padding(args)):
        pairs = _or_zero(pairs)
    return _combine(tracer, [x], [(pairs, 1.0)], out, dim, False)


def _counts_padding(args: tuple) -> bool:
    """True if a pooling counts the zeros of its padding, or divides by another number."""
    padding, include, divisor = ([*args[3:4], 0][0], [*args[5:6], True][0], [*args[6:7], None][0])
    padded = any(padding) if isinstance(padding, list | tuple) else bool(padding)
    return (padded and include) or divisor is not None


def _restride(tracer: "Tracer", packet: Any, args: tuple, kwargs: dict[str, Any], out: Tensor) -> bool:
    """New strides for axes of length one, as pooling writes them; no element moves."""
    x, size, stride = args[:3]
    shadow = tracer.shadow(x)
    if shadow is None or len(args) > 3 or tuple(size) != tuple(shadow.shape):
        return False
    return all(old == new for n, old, new in zip(size, tracer.stride_before, stride, strict=True) if n > 1)


def _combine(
    tracer: "Tracer",
    parts: list[Tensor],
    terms: list,
    out: Tensor,
    dim: int,
    written: bool,
    gains: Tensor | None = None,
) -> bool:
    """Make `out` a source of its own, a sum of `terms`.

    A term is pairs (code, channel) and a factor, or None if it is not followed.
    """
    where, kind = tracer.stack[-1] if tracer.stack else "", "sum" if gains is None else "scaled"
    parents = tuple(tuple(s.base for s, _ in tracer.trace.by_code(t[0][:, 0])) if t else None for t in terms)
    key = (
        kind,
        where,
        parents,
        tuple(t and t[1] for t in terms),
        out.shape[dim],
        None if gains is None else float(gains[0]),
    )
    source = tracer.trace.source(key, kind, where, out.shape[dim])
    source.gains = gains
    source.terms = [_joined(old, new) for old, new in zip(source.terms, terms, strict=True)] if source.terms else terms
    for part in parts:
        tracer.read(part, source)
        if (parameter := tracer._parameter(part)) is not None and tracer.shadow(part) is None:
            tracer.trace.weight_readers[parameter].add("a sum")
    if written:
        tracer._forget(parts[0])
    tracer.mark(out, source, dim)
    if tracer.trace.measuring and source.adds:
        source.measure(out, dim)
    return True


def _joined(old: tuple[Tensor, float] | None, new: tuple[Tensor, float] | None) -> tuple[Tensor, float] | None:
    if old is None or new is None:
        return None
    return (old[0] if torch.equal(old[0], new[0]) else torch.cat([old[0], new[0]]).unique(dim=0)), old[1]


def _add_bias(tracer: "Tracer", x: Tensor, bias: Tensor, out: Tensor) -> bool:
    """Note `x + bias`, where `x` is the output of a product and `bias` the bias of its layer."""
    shadow, parameter = tracer.shadow(x), tracer._parameter(bias)
    if shadow is None or parameter is None or bias.dim() != 1 or shadow.shape != out.shape:
        return False
    found = list(tracer.trace.by_code(shadow))
    if len(found) != 1 or found[0][0].product is None:
        return False
    product = found[0][0].product
    layers = {name for name, _ in tracer.trace.owners[product.view.parameter]}
    place = tracer.place(bias, product.view.outputs)
    if place is None or not layers & {name for name, _ in tracer.trace.owners[parameter]}:
        return False
    if tracer.trace.biases.setdefault(product, place) != place:
        return False
    tracer.shadows[out] = shadow
    return True


def is_channel_axis(shadow: Tensor, dim: int) -> bool:
    """True if every channel that is followed is at one index of an axis."""
    if _only_along(shadow, dim):
        return True
    pairs = channel_pairs(shadow, dim)
    pairs = pairs[pairs[:, 0] > ZERO]
    return 0 < len(pairs) == len(pairs[:, 0].unique())


def _only_along(shadow: Tensor, dim: int) -> bool:
    rows = channel_rows(shadow, dim)
    return shadow.dim() > 1 and bool((rows == rows[:1]).all()) and bool((rows[0] > ZERO).all())


POOLS = (aten.avg_pool1d, aten.avg_pool2d, aten.avg_pool3d)
RESIZES = (
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten._upsample_nearest_exact2d, aten.upsample_linear1d,
    aten.upsample_bilinear2d, aten._upsample_bilinear2d_aa, aten.upsample_bicubic2d, aten._upsample_bicubic2d_aa,
)  # fmt: skip
RULES: dict[Any, Callable[..., bool]] = {
    aten.mm: _matmul,
    aten.addmm: _matmul,
    aten.linear: _matmul,
    aten.convolution: _convolution,
    aten.embedding: _embedding,
    aten.add: _sum,
    aten.add_: _sum,
    aten.sub: _sum,
    aten.sub_: _sum,
    aten.mul: _scaled,
    aten.mul_: _scaled,
    aten.div: _scaled,
    aten.div_: _scaled,
    **dict.fromkeys((aten.mean, aten.sum, aten._adaptive_avg_pool2d, *POOLS, *RESIZES), _average),
    aten.index_add: _index_add,
    aten.index_add_: _index_add,
    aten.index_put: _index_put,
    aten.index_put_: _index_put,
    aten.as_strided_: _restride,
}
