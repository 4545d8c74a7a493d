"""What was recorded while a run trained: rows.csv of its folder, by quantity and place in the model."""

import csv
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from normkit.report.settings import Results, labels

FILE = "rows.csv"
COLUMNS = ("step", "site", "norm", "quantity", "value")
DISTANCES = {
    "distance_mean": "mean",
    "distance_var": "variance",
    "distance_quadratic": "quadratic mean",
}
"""Quantities of the picture of statistics: (1/d) ||batch - running|| of these (PowerNorm, Figure 2)."""

Values = dict[int, float | None]
"""By step; None where a value is not finite."""


class Rows(NamedTuple):
    """What a folder has: values by quantity and site ("" is the whole model), and the norm at each site."""

    values: dict[tuple[str, str], Values]
    norms: dict[str, str]

    def of(self, quantity: str) -> dict[str, Values]:
        """One quantity's values by site, in the order of the model."""
        return {site: values for (kind, site), values in self.values.items() if kind == quantity}


class Panel(NamedTuple):
    """One quantity of one run: its value at each step for each place in the model; None where it is not finite."""

    folder: Path
    label: str
    quantity: str
    steps: list[int]
    sites: Mapping[str, list[float | None]]

    @property
    def title(self) -> str:
        """What is seen in the panel."""
        return f"{self.label}: {DISTANCES.get(self.quantity, self.quantity)}"

    def median(self) -> list[float | None]:
        """The median over the places, at each step."""
        columns = [[v for v in column if v is not None] for column in zip(*self.sites.values(), strict=True)]
        return [statistics.median(column) if column else None for column in columns]


def panels(results: Results, quantities: tuple[str, ...] | None = tuple(DISTANCES)) -> list[Panel]:
    """The panels of all results whose folders have rows, of these quantities or (None) of all.

    ValueError for a file of rows that cannot be read.
    """
    names = labels(results)
    found = []
    for folder in results:
        rows = read(folder)
        for quantity in dict.fromkeys(kind for kind, _ in rows.values) if quantities is None else quantities:
            sites = rows.of(quantity)
            steps = sorted({step for values in sites.values() for step in values})
            lines = {site: [values.get(step) for step in steps] for site, values in sites.items()}
            if steps:
                found.append(Panel(Path(folder), names[folder], quantity, steps, lines))
    return found


def read(folder: str | Path) -> Rows:
    """Values by step, for each quantity and site, of the rows.csv in a folder; nothing where there is no such file.

    A last line without its end is still being written, and left out.
    """
    path = Path(folder) / FILE
    found = Rows({}, {})
    try:
        with path.open(encoding="utf8", newline="") as file:
            whole = file.read()
        reader = csv.reader(whole[: whole.rfind("\n") + 1].splitlines(), strict=True)
        head = tuple(next(reader, COLUMNS))
        if head != COLUMNS:
            raise ValueError(f"{path} has columns {', '.join(head)}; needs {', '.join(COLUMNS)}")
        for step, site, norm, quantity, text in reader:
            value = float(text)
            found.values.setdefault((quantity, site), {})[int(step)] = value if math.isfinite(value) else None
            found.norms[site] = norm
    except FileNotFoundError:
        return found
    except (TypeError, UnicodeDecodeError, csv.Error, ValueError) as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} is cut short or no file of rows: {error}") from None
    return found
