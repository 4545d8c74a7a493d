"""What was recorded while a run trained: rows.csv of its folder, by quantity and place in the model."""

import csv
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from normkit.lab.report.settings import Results, labels

FILE = "rows.csv"
COLUMNS = ("step", "site", "norm", "quantity", "value")
DISTANCES = {
    "distance_mean": "mean",
    "distance_var": "variance",
    "distance_quadratic": "quadratic mean",
}
"""Quantities of the picture of statistics: (1/d) ||batch - running|| of these (PowerNorm, Figure 2)."""

TAIL = 64  # bytes by which a file is known again

Values = dict[int, float | None]
"""By step; None where a value is not finite."""


class Rows(NamedTuple):
    """What a folder has: values by quantity and site ("" is the whole model), and the norm at each site."""

    values: dict[tuple[str, str], Values]
    norms: dict[str, str]

    def of(self, quantity: str) -> dict[str, Values]:
        """One quantity's values by site, in the order of the model: gradients are written down the other way round."""
        return {site: self.values[quantity, site] for site in self.norms if (quantity, site) in self.values}


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


def panels(
    results: Results, quantities: tuple[str, ...] | None = tuple(DISTANCES), reader: "Reader | None" = None
) -> list[Panel]:
    """The panels of all results whose folders have rows, of these quantities or (None) of all.

    ValueError for a file of rows that cannot be read.
    """
    names, reader = labels(results), reader or Reader()
    found = []
    for folder in results:
        rows = reader.read(folder)
        for quantity in dict.fromkeys(kind for kind, _ in rows.values) if quantities is None else quantities:
            sites = rows.of(quantity)
            steps = sorted(set().union(*sites.values()))
            lines = {site: [values.get(step) for step in steps] for site, values in sites.items()}
            if steps:
                found.append(Panel(Path(folder), names[folder], quantity, steps, lines))
    return found


class Reader:
    """Reads the rows.csv of folders; of a file that has grown since it was last read, only what is new.

    A last line without its end is still being written, and left for the next time. A file that was begun anew or cut is
    read from its start: its size, or the bytes before the place that was reached, tell.
    """

    def __init__(self) -> None:
        self._read: dict[Path, tuple[int, bytes, Rows]] = {}  # how far, the bytes before that, what they say

    def read(self, folder: str | Path) -> Rows:
        """Values by step, for each quantity and site; nothing where there is no such file. ValueError, naming it."""
        path = Path(folder) / FILE
        try:
            with path.open("rb") as file:
                done, before, found = self._read.get(path, (0, b"", Rows({}, {})))
                file.seek(done - len(before))
                if file.read(len(before)) != before:
                    done, before, found = 0, b"", Rows({}, {})
                    file.seek(0)
                new = file.read()
            new = new[: new.rfind(b"\n") + 1]
            _parse(new.decode("utf8"), found, head=not done)
            self._read[path] = done + len(new), (before + new)[-TAIL:], found
        except FileNotFoundError:
            return Rows({}, {})
        except (TypeError, UnicodeDecodeError, csv.Error, ValueError) as error:
            self._read.pop(path, None)  # half of it may have been taken over
            raise ValueError(f"{path} is cut short or no file of rows: {error}") from None
        return found


def read(folder: str | Path) -> Rows:
    """What a folder's rows.csv has, read once; see `Reader`."""
    return Reader().read(folder)


def _parse(text: str, into: Rows, head: bool) -> None:
    lines = csv.reader(text.split("\n")[:-1], strict=True)
    if head and (columns := tuple(next(lines, COLUMNS))) != COLUMNS:
        raise ValueError(f"it has columns {', '.join(columns)}; needs {', '.join(COLUMNS)}")
    for step, site, norm, quantity, number in lines:
        value = float(number)
        into.values.setdefault((quantity, site), {})[int(step)] = value if math.isfinite(value) else None
        into.norms[site] = norm
