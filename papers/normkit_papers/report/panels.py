"""Recorded values of runs, arranged for charts: a panel for each quantity of each run."""

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from normkit.watch.row_files import RunReader
from normkit_papers.report.settings import Results, labels

DISTANCES = {
    "distance_mean": "mean",
    "distance_var": "variance",
    "distance_quadratic": "quadratic mean",
}
"""Quantities of the figure of statistics: (1/d) ||batch - running|| of these (PowerNorm, Figure 2)."""


class Panel(NamedTuple):
    """One quantity of one run, by site, at each step; None where it is missing or not finite."""

    folder: Path
    label: str
    quantity: str
    steps: list[int]
    sites: Mapping[str, list[float | None]]

    @property
    def title(self) -> str:
        """Run and quantity."""
        return f"{self.label}: {DISTANCES.get(self.quantity, self.quantity)}"

    def median(self) -> list[float | None]:
        """The median over the sites, at each step."""
        columns = [[v for v in column if v is not None] for column in zip(*self.sites.values(), strict=True)]
        return [statistics.median(column) if column else None for column in columns]


def panels(
    results: Results, quantities: tuple[str, ...] | None = tuple(DISTANCES), reader: RunReader | None = None
) -> list[Panel]:
    """The panels of all results whose folders have rows.

    Args:
        results: Results by folder.
        quantities: Quantities to include; None for all.
        reader: Reader that has read the folders before, so that only new rows are read.

    Raises:
        ValueError: for a file of rows that cannot be read.
    """
    names, reader = labels(results), reader or RunReader()
    found = []
    for folder in results:
        recording = reader.read(folder)
        for quantity in recording.quantities if quantities is None else quantities:
            by_site = {site: dict(zip(s.steps, s.values, strict=True)) for site, s in recording.of(quantity).items()}
            steps = sorted(set().union(*by_site.values()))
            lines = {site: [_finite(values.get(step)) for step in steps] for site, values in by_site.items()}
            if steps:
                found.append(Panel(Path(folder), names[folder], quantity, steps, lines))
    return found


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
