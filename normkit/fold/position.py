"""The position of a norm in its model."""

from normkit.fold.trace import ZERO, Source, Trace


def position(trace: Trace, name: str) -> str:
    """The position of a norm: "pre", "post", "final", "embedding", "inner" or "unused"."""
    source, pairs = trace.sources.get(("norm", name)), trace.inputs.get(name)
    if source is None or pairs is None:
        return "unused"
    adds = any(isinstance(by, Source) and by.adds for by in source.reads)
    if bool((pairs[:, 0] <= ZERO).any()):
        return "post" if adds else "inner"
    before = [s for s, _ in trace.by_code(pairs[:, 0])]
    if any(isinstance(by, Source) and by.adds for s in before for by in s.reads) and not adds:
        return "pre"
    leaves = _leaves(trace, before, set())
    given = {by for s in trace.sources.values() if s.kind == "input" for by in s.reads}
    deep = leaves == {"convolution"} and not any(s.product in given for s in before)  # no patches, a CNN's layer
    if leaves and leaves <= {"embedding", "table", "convolution"} and not deep:
        return "embedding"
    summed = [s for s in before if s.adds]
    terms = [part for s in summed for pairs, _ in s.terms for part, _ in trace.by_code(pairs[:, 0])]
    if adds or any(part.kind == "norm" for part in terms):
        return "post"
    return "final" if summed else "inner"


def _leaves(trace: Trace, sources: list[Source], seen: set[int]) -> set[str]:
    """The kinds of layers that write some sources."""
    kinds: set[str] = set()
    for source in sources:
        if source.base in seen:
            continue
        seen.add(source.base)
        if source.product is not None:
            kinds.add(source.product.kind)
        elif source.kind == "norm":
            kinds.add("norm")
        for pairs, _ in source.terms:
            if bool((pairs[:, 0] <= ZERO).any()):
                kinds.add("unknown")
            else:
                kinds |= _leaves(trace, [s for s, _ in trace.by_code(pairs[:, 0])], seen)
    return kinds
