"""Draw what each norm costs alone, by depth, from the files that `normkit remove-norms --budget` writes.

python benchmarks/removal_costs.py docs/pictures/removal-costs.svg NAME=FILE.csv [NAME=FILE.csv ...]
"""

import csv
import math
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP = 720, 150, 60, 34
LOW, HIGH = -5, 2  # powers of ten
COLOURS = {"yes": "#2a7f62", "no": "#b5532f"}


def panel(name: str, rows: list[dict[str, str]], top: int) -> list[str]:
    """Return a bar a norm, on a logarithmic axis, with the budget as a line."""

    def y(value: float) -> float:
        power = min(max(math.log10(max(value, 10.0**LOW)), LOW), HIGH)
        return top + HEIGHT * (HIGH - power) / (HIGH - LOW)

    budget, step = float(rows[0]["budget"]), (WIDTH - LEFT - 10) / len(rows)
    gone = sum(row["gone"] == "yes" for row in rows)
    title = f"{name}: {gone} of {len(rows)} norms within a budget of {budget:g}. {rows[0]['unit']}"
    parts = [f'<text x="{LEFT}" y="{top - 8}" font-size="12">{title}</text>']
    for power in range(LOW, HIGH + 1):
        parts.append(f'<text x="{LEFT - 6}" y="{y(10.0**power) + 4}" text-anchor="end">{10.0**power:g}</text>')
        parts.append(f'<path d="M{LEFT} {y(10.0**power)}H{WIDTH - 10}" stroke="#8884"/>')
    for at, row in enumerate(rows):
        high, left = y(float(row["alone"])), LEFT + at * step
        size = f'width="{0.8 * step:.1f}" height="{max(top + HEIGHT - high, 1):.1f}"'
        place, label = f'x="{left:.1f}" y="{high:.1f}" {size}', f"<title>{row['norm']}</title>"
        parts.append(f'<rect {place} fill="{COLOURS[row["gone"]]}">{label}</rect>')
    return [*parts, f'<path d="M{LEFT} {y(budget)}H{WIDTH - 10}" stroke="currentColor" stroke-dasharray="4"/>']


def main(out: str, *given: str) -> None:
    parts, height = [], TOP
    for each in given:
        name, _, file = each.partition("=")
        with Path(file).open(encoding="utf8") as opened:
            parts += panel(name, list(csv.DictReader(opened)), height)
        height += HEIGHT + 2 * TOP
    note = "Depth from left to right. Green: gone, red: stays. Broken line: the budget. Bars below 0.00001 are cut."
    parts.append(f'<text x="{LEFT}" y="{height - TOP}" font-size="12">{note}</text>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height - TOP + 12}"'
    style = 'font-family="sans-serif" font-size="10" fill="currentColor" color="#666"'
    Path(out).write_text("\n".join([f"{head} {style}>", *parts, "</svg>", ""]), encoding="utf8")


if __name__ == "__main__":
    main(*sys.argv[1:])
