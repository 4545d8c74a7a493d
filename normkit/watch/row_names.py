"""Names that rows hold: norms by the kind of their statistics, and sites in a short text."""

from collections.abc import Iterable

from normkit.norms import NORMS, Norm, StatNorm, options, parse
from normkit.text import escape, truncate


def norm_class(norm: str) -> tuple[type[Norm] | None, dict[str, object]]:
    """The class (None if not normkit's) and the given options of a norm that rows name."""
    try:
        name, given = parse(norm)
    except (ValueError, TypeError):
        return None, {}
    return NORMS[name], given


def keeps_batch_statistics(norm: str) -> bool:
    """Return True if a norm, as rows name it, freezes batch statistics for evaluation.

    >>> [keeps_batch_statistics(norm) for norm in ("un(window=2)", "layer", "BatchNorm2d", "LlamaRMSNorm")]
    [True, False, True, False]
    """
    kind, _ = norm_class(norm)
    return "BatchNorm" in norm if kind is None else issubclass(kind, StatNorm)


def freezes_quadratic_means(norm: str) -> bool:
    """Return True if the frozen batch statistics of a norm are quadratic means alone.

    >>> [freezes_quadratic_means(norm) for norm in ("un(window=2)", "batch", "BatchNorm2d", "layer")]
    [True, False, False, False]
    """
    kind, _ = norm_class(norm)
    return kind is not None and issubclass(kind, StatNorm) and not kind.center


def relies_on_batch(norm: str) -> bool:
    """Return True if a norm divides by the statistics of each batch until the end of training.

    >>> [relies_on_batch(norm) for norm in ("batch", "pnv", "BatchNorm2d", "un", "layer")]
    [True, True, True, False, False]
    """
    return keeps_batch_statistics(norm) and not warms_up(norm)


def warms_up(norm: str) -> bool:
    """Return True if a norm starts with the statistics of each batch, for `warmup` steps."""
    kind, _ = norm_class(norm)
    return kind is not None and issubclass(kind, StatNorm) and "warmup" in options(parse(norm)[0])


def format_sites(sites: Iterable[str]) -> str:
    """List sites in few words: numbered neighbours as a range, at most six entries.

    >>> format_sites(["layers.4.norm1", "layers.5.norm1", "layers.6.norm1", "final_norm"])
    'layers.4-6.norm1, final_norm'
    """
    ranges: list[tuple[str, int, int, str]] = []
    plain: list[str] = []
    for site in map(escape, sites):
        head, number, tail = _numbered(site)
        if number is None:
            plain.append(site or "the model")
            continue
        before = [i for i, (h, _, last, t) in enumerate(ranges) if (h, last + 1, t) == (head, number, tail)]
        if before:
            ranges[before[0]] = (head, ranges[before[0]][1], number, tail)
        else:
            ranges.append((head, number, number, tail))
    shown = [f"{head}{a}{tail}" if a == b else f"{head}{a}-{b}{tail}" for head, a, b, tail in ranges]
    return ", ".join(truncate([*shown, *plain]))


def _numbered(site: str) -> tuple[str, int | None, str]:
    parts = site.split(".")
    place = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if place is None:
        return site, None, ""
    head, tail = (f"{'.'.join(part)}" for part in (parts[:place], parts[place + 1 :]))
    return head and f"{head}.", int(parts[place]), tail and f".{tail}"
