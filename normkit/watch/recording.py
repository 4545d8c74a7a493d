"""Recorded numbers in memory: rows, series over the steps, and whole recordings."""

import math
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Row(NamedTuple):
    """One number of one norm at one step."""

    step: int
    site: str
    norm: str
    quantity: str
    value: float


class Series(NamedTuple):
    """One quantity of one norm over the steps; values may be nan or infinite."""

    norm: str
    steps: list[int]
    values: list[float]

    def points(self) -> list[tuple[int, float]]:
        """Steps and finite values, in the order of the steps."""
        pairs = zip(self.steps, self.values, strict=True)
        return sorted((step, value) for step, value in pairs if math.isfinite(value))

    def late(self) -> list[float]:
        """Finite values of the second half of the steps."""
        middle = (self.steps[0] + self.steps[-1]) / 2
        return [value for step, value in self.points() if step >= middle]

    def middle(self) -> float:
        """Median of the late values; nan without one."""
        late = self.late()
        return statistics.median(late) if late else math.nan

    def top(self) -> float:
        """The largest finite value of all steps; nan without one."""
        return max((value for value in self.values if math.isfinite(value)), default=math.nan)


def checked_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield rows; a TypeError for anything else."""
    for row in rows if isinstance(rows, Iterable) else [rows]:
        if not isinstance(row, Row):
            raise TypeError(f"a recording consists of rows, as normkit.record gives them; got {type(row).__name__}")
        yield row


class Recording:
    """Recorded values of a run, as series by quantity and site.

    Attributes:
        sites: The norm at each site, in the order of the model; "" for what is no norm, such as the whole model.
        quantities: The series of each quantity by site, in the order in which they were recorded.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.sites: dict[str, str] = {}
        self.quantities: dict[str, dict[str, Series]] = {}
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, steps ascending."""
        for row in checked_rows(rows):
            series = self.quantities.setdefault(row.quantity, {})
            if row.site not in series:
                series[row.site] = Series(row.norm, [], [])
                self.sites.setdefault(row.site, row.norm)
            series[row.site].steps.append(row.step)
            series[row.site].values.append(row.value)

    def of(self, quantity: str) -> dict[str, Series]:
        """Series of a quantity by site in the model's order; backward passes record in reverse."""
        found = self.quantities.get(quantity, {})
        return {site: found[site] for site in self.sites if site in found}

    def norms(self) -> dict[str, str]:
        """The norm at each site that has one."""
        return {site: norm for site, norm in self.sites.items() if norm}

    def middle(self, quantity: str, site: str) -> float:
        """Late median of a quantity at a site; nan if it was not recorded."""
        series = self.quantities.get(quantity, {}).get(site)
        return math.nan if series is None else series.middle()

    def last_step(self) -> int:
        """The last step with a value; 0 without any."""
        return max((s.steps[-1] for series in self.quantities.values() for s in series.values()), default=0)


def as_recording(rows: Iterable[Row] | Recording) -> Recording:
    """Return rows as a recording; a TypeError for anything else, a ValueError without any row."""
    found = rows if isinstance(rows, Recording) else Recording(rows)
    if not found.quantities:
        raise ValueError("there are no rows to judge; record some with normkit.record")
    return found
