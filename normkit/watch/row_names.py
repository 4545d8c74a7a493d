"""Names that rows hold: norms by the kind of their statistics, and sites in a short text."""

import re
from collections.abc import Iterable

from normkit._util import escape, truncate
from normkit.norms import NORMS, Norm, StatNorm, options, parse

NUMBERED = re.compile(r"((?:[^.]*\.)*?)(\d+)(|\..*)")  # the name of a site around its first part that is a number
UNTRACKED = "(track_running_stats=False)"  # follows the class of a BatchNorm that keeps nothing for evaluation
RENAMED = {f"stray_{kind}": f"drift_{kind}" for kind in ("mean", "var", "quadratic")}  # in files of version 0.2.0


def current_name(quantity: str) -> str:
    """Return the name of a quantity today, given one from any version.

    >>> current_name("stray_mean"), current_name("rms")
    ('drift_mean', 'rms')
    """
    return RENAMED.get(quantity, quantity)


def norm_class(norm: str) -> tuple[type[Norm] | None, dict[str, object]]:
    """The class (None if not normkit's) and the given options of a norm that rows name."""
    try:
        name, given = parse(norm)
    except (ValueError, TypeError):
        return None, {}
    return NORMS[name], given


def keeps_batch_statistics(norm: str) -> bool:
    """Return True if a norm, as rows name it, divides by statistics of batches.

    >>> [keeps_batch_statistics(norm) for norm in ("un(window=2)", "layer", "BatchNorm2d", "FrozenBatchNorm2d")]
    [True, False, True, False]
    """
    kind, _ = norm_class(norm)
    return "BatchNorm" in norm and "Frozen" not in norm if kind is None else issubclass(kind, StatNorm)


def freezes_quadratic_means(norm: str) -> bool:
    """Return True if the frozen batch statistics of a norm are quadratic means alone.

    >>> [freezes_quadratic_means(norm) for norm in ("un(window=2)", "batch", "BatchNorm2d", "layer")]
    [True, False, False, False]
    """
    kind, _ = norm_class(norm)
    return kind is not None and issubclass(kind, StatNorm) and not kind.center


def relies_on_batch(norm: str) -> bool:
    """Return True if a norm trains with each batch's own statistics, and freezes others.

    >>> [relies_on_batch(norm) for norm in ("batch", "pnv", "BatchNorm2d", "un", "layer")]
    [True, True, True, False, False]
    """
    return keeps_batch_statistics(norm) and not warms_up(norm) and UNTRACKED not in norm


def warms_up(norm: str) -> bool:
    """Return True if a norm starts with the statistics of each batch, for `warmup` steps."""
    kind, _ = norm_class(norm)
    return kind is not None and issubclass(kind, StatNorm) and "warmup" in options(parse(norm)[0])


def format_sites(sites: Iterable[str]) -> str:
    """List sites in few words: numbered neighbours as a range, at most six entries.

    >>> format_sites(["layers.4.norm1", "layers.5.norm1", "layers.6.norm1", "final_norm"])
    'layers.4-6.norm1, final_norm'
    """
    ranges: list[tuple[str, str, list[int]]] = []  # what is before and after the number, and the numbers
    plain: list[str] = []
    for site in map(escape, sites):
        if (match := NUMBERED.fullmatch(site)) is None:
            plain.append(site or "the model")
            continue
        head, number, tail = match[1], int(match[2]), match[3]
        neighbours = [known for h, t, known in ranges if (h, t, known[-1] + 1) == (head, tail, number)]
        if neighbours:
            neighbours[0].append(number)
        else:
            ranges.append((head, tail, [number]))
    shown = [f"{head}{n[0]}{tail}" if len(n) == 1 else f"{head}{n[0]}-{n[-1]}{tail}" for head, tail, n in ranges]
    return ", ".join(truncate([*shown, *plain]))
