"""Draw what each norm costs alone, by depth, from files of `normkit remove-norms --budget`.

python benchmarks/removal_costs.py docs/pictures/removal-costs.svg NAME=FILE.csv [NAME=FILE.csv ...]
"""

import csv
import sys
from pathlib import Path

from matplotlib import pyplot as plt
from picture import GREY  # and the style

COLORS = {"yes": "#2a7f62", "no": "#b5532f"}
LOW = 1e-5  # shorter bars are not seen


def main(out: str, *given: str) -> None:
    """Write one panel for each file."""
    figure, panels = plt.subplots(len(given), squeeze=False, figsize=(8, 2.8 * len(given)), layout="constrained")
    for axes, each in zip(panels[:, 0], given, strict=True):
        name, _, file = each.partition("=")
        with Path(file).open(encoding="utf8", newline="") as opened:
            rows = list(csv.DictReader(opened))
        costs, budget = [max(float(row["alone"]), LOW) for row in rows], float(rows[0]["budget"])
        axes.bar(range(len(rows)), costs, color=[COLORS[row["gone"]] for row in rows])
        axes.axhline(budget, color=GREY, linestyle="--", linewidth=1)
        axes.set_yscale("log")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.tick_params(colors=GREY)
        axes.set_ylabel(rows[0]["unit"], color=GREY)
        axes.set_xlabel("norms by depth; green: gone, red: stays; broken line: the budget for all", color=GREY)
        gone = sum(row["gone"] == "yes" for row in rows)
        axes.set_title(f"{name}: {gone} of {len(rows)} norms gone within a budget of {budget:g}", color=GREY)
        for side in axes.spines.values():
            side.set_color(GREY)
    figure.savefig(out, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main(*sys.argv[1:])
