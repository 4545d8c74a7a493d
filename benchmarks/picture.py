"""Draw the README's picture from results/deploy.csv.

python benchmarks/picture.py [--model minilm] [--out docs/pictures/deploy.svg]
"""

import argparse
import csv
from pathlib import Path

import matplotlib as mpl

ROOT = Path(__file__).parents[1]
SCHEMES = {  # with what stands in the norms' place: post-norm models are folded whole in float alone
    "float32": ("float32", "folded"), "attention": ("float32, attention fused", "folded"),
    "dynamic": ("8-bit integers, multiply-adds", "un"),
}  # fmt: skip
NORMS = {True: ("LayerNorm", "#9aa4b2"), False: ("without norms", "#3f51b5")}
GREY = "#777777"  # readable on light and dark pages
mpl.use("svg")
mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "normkit", "font.family": "sans-serif", "font.size": 10}


def rows_of(model: str) -> dict[tuple[str, str], dict[str, str]]:
    """Rows of one thread and one sequence in onnxruntime, by scheme and norm."""
    with (ROOT / "benchmarks" / "results" / "deploy.csv").open(encoding="utf8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model and row["runtime"] == "onnxruntime"]
    return {(row["scheme"], row["norm"]): row for row in rows if (row["batch"], row["threads"]) == ("1", "1")}


def draw(model: str, out: Path) -> None:
    """Write the picture as SVG, readable on light and dark pages."""
    from matplotlib import pyplot as plt
    from matplotlib.patches import Rectangle

    rows = rows_of(model)
    whole = float(rows["float32", "layer"]["ms"])
    figure, axes = plt.subplots(figsize=(7, 2.6))
    labels, y = [], 0.0
    for scheme, (label, without) in SCHEMES.items():
        labels.append((y + 0.5, label))
        for with_norms, (_, color) in NORMS.items():
            row = rows[scheme, "layer" if with_norms else without]
            time = float(row["ms"]) / whole
            axes.barh(y, time, color=color, height=0.9)
            axes.text(time + 0.01, y, f"time {time:.2f}, cosine {float(row['likeness']):.3f}", va="center", color=GREY)
            y += 1
        y += 0.6
    axes.set_yticks([place for place, _ in labels], [label for _, label in labels])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45)
    axes.set_xticks([])
    handles = [Rectangle((0, 0), 1, 1, color=color, label=label) for label, color in NORMS.values()]
    axes.legend(handles=handles, loc="lower right", frameon=False, labelcolor=GREY)
    axes.tick_params(colors=GREY, length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(out, transparent=True, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "deploy.svg")
    given = parser.parse_args()
    draw(given.model, given.out)


if __name__ == "__main__":
    main()
