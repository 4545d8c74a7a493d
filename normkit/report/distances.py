"""How far the statistics of batches stray from the running ones: rows.csv of a run folder, by norm and place."""

import csv
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from normkit.report.settings import Results, labels

FILE = "rows.csv"
COLUMNS = ("step", "site", "norm", "quantity", "value")
QUANTITIES = {
    "distance_mean": "mean",
    "distance_var": "variance",
    "distance_quadratic": "quadratic mean",
}
"""Quantities that are drawn: (1/d) ||batch - running|| of these statistics (PowerNorm, Figure 2)."""


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
        return f"{self.label}: {QUANTITIES[self.quantity]}"

    def median(self) -> list[float | None]:
        """The median over the places, at each step."""
        columns = [[v for v in column if v is not None] for column in zip(*self.sites.values(), strict=True)]
        return [statistics.median(column) if column else None for column in columns]


def panels(results: Results) -> list[Panel]:
    """The panels of all results whose folders have rows; ValueError for a file of rows that cannot be read."""
    names = labels(results)
    found = []
    for folder in results:
        series = read(Path(folder))
        for quantity in QUANTITIES:
            sites = {site: values for (kind, site), values in series.items() if kind == quantity}
            steps = sorted({step for values in sites.values() for step in values})
            lines = {site: [values.get(step) for step in steps] for site, values in sites.items()}
            if steps:
                found.append(Panel(Path(folder), names[folder], quantity, steps, lines))
    return found


def read(folder: Path) -> dict[tuple[str, str], dict[int, float | None]]:
    """Values by step, for each quantity and site, of the rows.csv in a folder; nothing where there is no such file."""
    path = folder / FILE
    found: dict[tuple[str, str], dict[int, float | None]] = {}
    try:
        with path.open(encoding="utf8", newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if reader.fieldnames is not None and tuple(reader.fieldnames) != COLUMNS:
                raise ValueError(f"{path} has columns {', '.join(reader.fieldnames)}; needs {', '.join(COLUMNS)}")
            for row in reader:
                value = float(row["value"])
                series = found.setdefault((row["quantity"], row["site"]), {})
                series[int(row["step"])] = value if math.isfinite(value) else None
    except FileNotFoundError:
        return {}
    except (TypeError, UnicodeDecodeError, csv.Error, ValueError) as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} is cut short or no file of rows: {error}") from None
    return found
