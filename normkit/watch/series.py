"""Rows as a doctor reads them: each quantity of each norm over the steps, and places told in few words."""

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from normkit.norms import NORMS, StatNorm, parse
from normkit.watch.rows import Row


class Series(NamedTuple):
    """One quantity of one norm over the steps."""

    norm: str
    steps: list[int]
    values: list[float]

    def late(self) -> list[float]:
        """Finite values of the second half of the steps, when running statistics have forgotten their start."""
        middle = (self.steps[0] + self.steps[-1]) / 2
        return [v for s, v in zip(self.steps, self.values, strict=True) if s >= middle and math.isfinite(v)]

    def middle(self) -> float:
        """Their median; nan where there is none."""
        late = self.late()
        return statistics.median(late) if late else math.nan

    def top(self) -> float:
        """The largest finite value of all; nan where there is none."""
        return max((value for value in self.values if math.isfinite(value)), default=math.nan)


Table = dict[str, dict[str, Series]]  # quantity -> site -> values


def tabulate(rows: Iterable[Row] | Table) -> Table:
    """Rows by quantity and site, in the order of the steps; a table as it is. ValueError where there are none."""
    if not isinstance(rows, Iterable):
        raise TypeError(f"what is judged is rows, as normkit.record gives them; got {type(rows).__name__}")
    table: Table = rows if isinstance(rows, dict) else {}  # type: ignore[assignment]
    for row in () if isinstance(rows, dict) else rows:
        if not isinstance(row, Row):
            raise TypeError(f"what is judged is rows, as normkit.record gives them; got a {type(row).__name__}")
        sites = table.setdefault(row.quantity, {})
        series = sites.get(row.site) or sites.setdefault(row.site, Series(row.norm, [], []))
        series.steps.append(row.step)
        series.values.append(row.value)
    if not table:
        raise ValueError("there are no rows to judge; record some with normkit.record")
    return table


def norms(table: Table) -> dict[str, str]:
    """The norm at each place; what is no norm, such as the whole model or an embedding, is left out."""
    return {site: series.norm for sites in table.values() for site, series in sites.items() if series.norm}


def middle(table: Table, quantity: str, site: str) -> float:
    """A quantity's late median at a place; nan where it was not recorded."""
    series = table.get(quantity, {}).get(site)
    return math.nan if series is None else series.middle()


def keeps_batch_statistics(norm: str) -> bool:
    """Whether a norm, as rows name it, freezes batch statistics for evaluation.

    >>> [keeps_batch_statistics(norm) for norm in ("un(window=2)", "layer", "BatchNorm2d", "LlamaRMSNorm")]
    [True, False, True, False]
    """
    try:
        return issubclass(NORMS[parse(norm)[0]], StatNorm)
    except (ValueError, TypeError):
        return "BatchNorm" in norm


def freezes_quadratic_means(norm: str) -> bool:
    """Whether those are quadratic means alone.

    >>> [freezes_quadratic_means(norm) for norm in ("un(window=2)", "batch", "BatchNorm2d", "layer")]
    [True, False, False, False]
    """
    try:
        kind = NORMS[parse(norm)[0]]
    except ValueError:
        return False
    return issubclass(kind, StatNorm) and not kind.center


def places(sites: Iterable[str]) -> str:
    """Sites in few words: numbered neighbours as a range.

    >>> places(["layers.4.norm1", "layers.5.norm1", "layers.6.norm1", "final_norm"])
    'layers.4-6.norm1, final_norm'
    """
    shown: list[tuple[str, int, int, str]] = []
    plain: list[str] = []
    for site in sites:
        head, number, tail = _numbered(site)
        runs = [i for i, run in enumerate(shown) if (run[0], run[3]) == (head, tail) and run[2] + 1 == number]
        if number is None:
            plain.append(site or "the model")
        elif runs:
            shown[runs[0]] = (*shown[runs[0]][:2], number, tail)
        else:
            shown.append((head, number, number, tail))
    ranges = [f"{head}{a}{tail}" if a == b else f"{head}{a}-{b}{tail}" for head, a, b, tail in shown]
    every = [*ranges, *plain]
    return ", ".join(every[:6]) + (f" and {len(every) - 6} more" if len(every) > 6 else "")


def _numbered(site: str) -> tuple[str, int | None, str]:
    parts = site.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            head, tail = ".".join(parts[:i]), ".".join(parts[i + 1 :])
            return head + "." if head else "", int(part), "." + tail if tail else ""
    return site, None, ""
